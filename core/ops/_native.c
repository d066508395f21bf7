/* The Python module around the kernels. Tensors come as addresses and sizes; who calls has checked them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "native_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

enum { WORTH_RELEASING = 65536 };

/* What this thread records its calls on; null when it doesn't. */
static _Thread_local struct {
    tape_op *ops;
    int64_t count, room;
} tape;
static _Thread_local int recording, torn; /* torn: there was no memory for an op */

static void note(tape_op op) {
    if (!recording) return;
    if (tape.count == tape.room) {
        tape_op *const more = realloc(tape.ops, (size_t)(2 * tape.room + 64) * sizeof op);
        if (!more) {
            torn = 1;
            return;
        }
        tape.ops = more;
        tape.room = 2 * tape.room + 64;
    }
    tape.ops[tape.count++] = op;
}

/* Reads `count` integers; sets an error and returns 0 when there is another number of them or one is no integer. */
static int numbers(PyObject *const *args, Py_ssize_t given, Py_ssize_t count, int64_t *out) {
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count, given);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(args[i]);
        if (out[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

/* Runs a kernel, without the interpreter lock when it is long enough to matter to other threads. */
#define RUN(work, call)                  \
    do {                                 \
        if ((work) > WORTH_RELEASING) {  \
            Py_BEGIN_ALLOW_THREADS call; \
            Py_END_ALLOW_THREADS         \
        } else {                         \
            call;                        \
        }                                \
    } while (0)

static PyObject *pack_rows(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[6]; /* weight, rows, k, packed, first row, threads */
    if (!numbers(args, given, 6, n)) return NULL;
    RUN(n[1] * n[2], engine_pack_rows((void *)n[0], n[1], n[2], (void *)n[3], n[4], (int)n[5]));
    Py_RETURN_NONE;
}

static PyObject *linear(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[11]; /* x, stride, packed, bias, y, m, n, k, y is float, is gated, threads */
    if (!numbers(args, given, 11, n)) return NULL;
    const linear_args call = {(void *)n[0], n[1], (void *)n[2], (void *)n[3], (void *)n[4], n[5],
                              n[6],         n[7], (int)n[8],    (int)n[9],    (int)n[10]};
    note((tape_op){.kind = OP_LINEAR, .linear = call});
    RUN(call.n * call.k, engine_linear(&call));
    Py_RETURN_NONE;
}

static PyObject *quant_linear(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[15]; /* x, stride, packed, bias, y, inputs, m, n, k, bits, offsets, x and y are bf16, is gated, threads */
    if (!numbers(args, given, 15, n)) return NULL;
    const quant_args call = {(void *)n[0], n[1], (void *)n[2], (void *)n[3], (void *)n[4], (void *)n[5],  n[6],
                             n[7],         n[8], (int)n[9],    (int)n[10],   (int)n[11],   (int)n[12], (int)n[13],
                             (int)n[14]};
    note((tape_op){.kind = OP_QUANTIZE, .quant = call});
    note((tape_op){.kind = OP_QUANT_PRODUCT, .quant = call});
    RUN(call.n * call.k, engine_quant_linear(&call));
    Py_RETURN_NONE;
}

static PyObject *rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[11]; /* x, outer, inner, outer stride, inner stride, width, weight, residual, y, is bf16, threads; eps */
    if (!numbers(args, given - 1, 11, n)) return NULL;
    const double eps = PyFloat_AsDouble(args[11]);
    if (eps == -1 && PyErr_Occurred()) return NULL;
    const norm_args call = {(void *)n[0], n[1],         n[2],         n[3],       n[4],      n[5],
                            (void *)n[6], (void *)n[7], (void *)n[8], (float)eps, (int)n[9], (int)n[10]};
    note((tape_op){.kind = OP_NORM, .norm = call});
    RUN(call.outer * call.inner * call.width, engine_rms_norm(&call));
    Py_RETURN_NONE;
}

static PyObject *rope(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[14]; /* q, heads, token and head stride; the same of k; positions, cos_sin, tokens, rotary, is bf16,
                      threads */
    if (!numbers(args, given, 14, n)) return NULL;
    const rope_args call = {{{(void *)n[0], n[1], n[2], n[3]}, {(void *)n[4], n[5], n[6], n[7]}},
                            (void *)n[8],
                            (void *)n[9],
                            n[10],
                            n[11],
                            (int)n[12],
                            (int)n[13]};
    note((tape_op){.kind = OP_ROPE, .rope = call});
    RUN(call.tokens * (n[1] + n[5]) * call.rotary, engine_rope(&call));
    Py_RETURN_NONE;
}

static PyObject *silu_mul(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[7]; /* x, stride, y, tokens, width, is bf16, threads */
    if (!numbers(args, given, 7, n)) return NULL;
    const gate_args call = {(void *)n[0], n[1], (void *)n[2], n[3], n[4], (int)n[5], (int)n[6]};
    note((tape_op){.kind = OP_GATE, .gate = call});
    RUN(call.tokens * call.width, engine_silu_mul(&call));
    Py_RETURN_NONE;
}

/* Reads a plan; sets an error and returns 0 when it is none. */
static int plan_of(PyObject *given, attention_plan *plan) {
    if (!PyBytes_Check(given) || PyBytes_GET_SIZE(given) != sizeof *plan) {
        PyErr_Format(PyExc_TypeError, "the plan must be bytes of %zu", sizeof *plan);
        return 0;
    }
    memcpy(plan, PyBytes_AS_STRING(given), sizeof *plan);
    return 1;
}

static PyObject *attention(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[15]; /* the plan as bytes; then q, k, v, strides of token and head of each, pages, their strides, out,
                      window */
    attention_plan plan;
    if (given < 1) return PyErr_Format(PyExc_TypeError, "expected a plan");
    if (!plan_of(args[0], &plan) || !numbers(args + 1, given - 1, 15, n)) return NULL;
    const attention_args call = {(void *)n[0], (void *)n[1], (void *)n[2],  n[3],  n[4],  n[5],          n[6], n[7],
                                 n[8],         (void *)n[9], (void *)n[10], n[11], n[12], (void *)n[13], n[14]};
    note((tape_op){.kind = OP_ATTENTION, .attention = call});
    Py_BEGIN_ALLOW_THREADS engine_attention(&plan, &call);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[5]; /* table, ids, y, rows, bytes of a row */
    if (!numbers(args, given, 5, n)) return NULL;
    const gather_args call = {(void *)n[0], (void *)n[1], (void *)n[2], n[3], n[4]};
    note((tape_op){.kind = OP_GATHER, .gather = call});
    engine_gather(&call);
    Py_RETURN_NONE;
}

static PyObject *peaks(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[6]; /* x, rows, width, places, finite, threads */
    if (!numbers(args, given, 6, n)) return NULL;
    const peak_args call = {(void *)n[0], n[1], n[2], (void *)n[3], (void *)n[4], (int)n[5]};
    RUN(n[1] * n[2], engine_peaks(&call));
    Py_RETURN_NONE;
}

static PyObject *record(PyObject *self, PyObject *unused) {
    recording = 1;
    torn = 0;
    tape.count = 0;
    Py_RETURN_NONE;
}

static PyObject *recorded(PyObject *self, PyObject *unused) {
    recording = 0;
    const Py_ssize_t size = tape.count * (Py_ssize_t)sizeof *tape.ops;
    PyObject *const ops = torn ? PyErr_NoMemory() : PyBytes_FromStringAndSize((char *)tape.ops, size);
    free(tape.ops);
    tape.ops = NULL;
    tape.count = tape.room = 0;
    return ops;
}

static PyObject *replay(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    attention_plan plan; /* the ops, a plan, threads */
    int64_t threads;
    if (given != 3 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) % sizeof(tape_op))
        return PyErr_Format(PyExc_TypeError, "expected a tape, a plan and a number");
    if (!plan_of(args[1], &plan) || !numbers(args + 2, 1, 1, &threads)) return NULL;
    const tape_op *const ops = (const tape_op *)PyBytes_AS_STRING(args[0]);
    const int64_t count = PyBytes_GET_SIZE(args[0]) / (Py_ssize_t)sizeof(tape_op);
    Py_BEGIN_ALLOW_THREADS engine_replay(ops, count, &plan, (int)threads);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

#define METHOD(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, doc}
#define METHODS                                                                                                     \
    METHOD(pack_rows, "Put rows of a bfloat16 weight into their panels."),                                          \
        METHOD(linear, "Product with a packed weight."),                                                            \
        METHOD(quant_linear, "Product with a weight of 4 or 8 bits."),                                              \
        METHOD(rms_norm, "RMS norm, with or without a residual."),                                                  \
        METHOD(rope, "Rotate queries and keys in place."), METHOD(silu_mul, "Gated activation."),                   \
        METHOD(attention, "Store KV and attend."), METHOD(gather, "Rows of a table."),                              \
        METHOD(peaks, "Largest numbers."), METHOD(replay, "Repeat recorded calls."),                                \
        {"record", record, METH_NOARGS, "From now on note the calls of this thread, which run as ever."},           \
        {"recorded", recorded, METH_NOARGS, "Note no more; returns what was noted."},

static int supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

#else
#define METHODS
static int supported(void) {
    return 0;
}
#endif

static PyObject *features(PyObject *self, PyObject *unused) {
    return supported() ? Py_BuildValue("(s)", "avx512_bf16") : PyTuple_New(0);
}

static PyMethodDef methods[] = {
    METHODS{"features", features, METH_NOARGS, "Names of the kernel sets that this processor can run."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "CPU kernels.", -1, methods};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *self = PyModule_Create(&module);
    if (self && (PyModule_AddIntConstant(self, "ATTENTION_SEGMENT", ATTENTION_SEGMENT) < 0 ||
                 PyModule_AddIntConstant(self, "QUANT_INPUT_BYTES", QUANT_INPUT_BYTES) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
