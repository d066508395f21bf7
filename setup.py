"""Builds the optional CPU kernels; without a C compiler the install goes on and the plain path is used."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "engine.ops._native",
            sources=["core/ops/_native.c"],
            extra_compile_args=["-O3", "-fopenmp", "-std=gnu11", "-fno-math-errno"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
