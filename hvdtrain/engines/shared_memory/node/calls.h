/* Calls from Python, without the cost of ctypes. Included where the calls of C are defined. */

#ifndef HVD_NODE_CALLS_H
#define HVD_NODE_CALLS_H

#include "../../../compiled/kernel.h"
#include "vote.h"

EMBED_TEXT;

#if defined(HVD_WITH_PYTHON) || (!defined(HVD_WITHOUT_PYTHON) && __has_include(<Python.h>))
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Peers usually arrive within so many looks. To release the GIL first would take longer, if other
 * threads wait for it. */
enum { LOOKS = 128 };

static int find_all(const team_t *team) {
    for (int looks = 0; looks < LOOKS; looks++) {
        int32_t rank = 0;
        while (rank < team->size &&
               !is_behind(atomic_load_explicit(&team->slots[rank]->phase, memory_order_relaxed),
                          team->phase))
            rank++;
        if (rank == team->size) return 1;
        if (!team->spin_nanoseconds) break;
        relax();
    }
    return 0;
}

/* Return whether it is time to check peers, to within milliseconds. */
static int is_due(const team_t *team) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec > *team->due;
}

/* Operations without a name differ in their number, from 1; as Request.ballot does it. */
static void write_ballot(task_t *task, const char *ballot, uint64_t number) {
    uint64_t pair[2];
    memcpy(pair, ballot, sizeof pair);
    pair[0] += number * 0x9e3779b97f4a7c15u;
    pair[1] = ~pair[0];
    for (int i = 0; i < 6; i += 2) memcpy(task->ballot + i, pair, sizeof pair);
}

static PyObject *call_cast(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 4 || !PyBytes_Check(args[1]) || PyBytes_Size(args[1]) != 16) {
        PyErr_SetString(PyExc_TypeError, "cast(task, ballot of 16 bytes, number, source)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    uint64_t number = PyLong_AsUnsignedLongLong(args[2]);
    const char *source = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return NULL;
    write_ballot(task, PyBytes_AsString(args[1]), number);
    task->whole.source = source;
    task->stage = START, task->chunk = 0;
    cast_vote(task);
    Py_RETURN_NONE;
}

static PyObject *call_look(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "look(task, data)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    char *data = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred()) return NULL;
    task->whole.data = data;
    int soon = is_small(task) && !is_due(task->team) && find_all(task->team);
    return PyLong_FromLong(soon ? hvd_vote(task, 0) : AGAIN);
}

static PyObject *call_resume(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "resume(task, timeout)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    int64_t timeout = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    int32_t verdict;
    Py_BEGIN_ALLOW_THREADS
    verdict = hvd_vote(task, timeout);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(verdict);
}

static PyMethodDef CALLS[] = {
    {"cast", (PyCFunction)(void (*)(void))call_cast, METH_FASTCALL, "Vote on a task."},
    {"look", (PyCFunction)(void (*)(void))call_look, METH_FASTCALL, "Wait for a vote a moment."},
    {"resume", (PyCFunction)(void (*)(void))call_resume, METH_FASTCALL, "Wait for a vote again."},
    {0},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_node_kernel", .m_size = -1, .m_methods = CALLS};

PyMODINIT_FUNC PyInit__node_kernel(void) {
    PyObject *module = PyModule_Create(&MODULE);
#ifdef Py_GIL_DISABLED
    /* Callers hold a lock of the channel: no two threads have the same task. */
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}

#endif
#endif
