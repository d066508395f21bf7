"""Builds the optional CPU kernels; without a C compiler the install goes on and the plain path is used."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-fopenmp", "-std=gnu11", "-fno-math-errno", "-fno-strict-aliasing", "-Wall"]

setup(
    ext_modules=[
        Extension(
            "engine.ops._native",
            sources=[
                "core/ops/_native.c",
                "core/ops/native_attention.c",
                "core/ops/native_linear.c",
                "core/ops/native_pointwise.c",
                "core/ops/native_quant.c",
                "core/ops/native_tape.c",
            ],
            depends=[f"core/ops/native_{name}.h" for name in ("kernels", "pages", "scores", "simd", "tile")],
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
