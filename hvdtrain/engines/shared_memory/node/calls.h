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
    for (int looks = 0; looks < LOOKS && team->spin_nanoseconds; looks++) {
        int32_t rank = 0;
        while (rank < team->size &&
               !is_behind(atomic_load_explicit(&team->slots[rank]->phase, memory_order_relaxed),
                          team->phase))
            rank++;
        if (rank == team->size) return 1;
        relax();
    }
    return 0;
}

static PyObject *wait_for_verdict(task_t *task, int64_t timeout) {
    int32_t verdict;
    Py_BEGIN_ALLOW_THREADS
    verdict = hvd_vote(task, timeout);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(verdict);
}

static PyObject *call_vote(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5 || !PyBytes_Check(args[1]) || PyBytes_Size(args[1]) != 16) {
        PyErr_SetString(PyExc_TypeError, "vote(task, ballot of 16 bytes, source, data, timeout)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    const char *source = PyLong_AsVoidPtr(args[2]);
    char *data = PyLong_AsVoidPtr(args[3]);
    int64_t timeout = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    const char *ballot = PyBytes_AsString(args[1]);
    for (int i = 0; i < 6; i += 2) memcpy(task->ballot + i, ballot, 16);
    task->whole.source = source, task->whole.data = data;
    task->stage = START, task->chunk = 0;
    cast_vote(task);
    return is_small(task) && find_all(task->team) ? PyLong_FromLong(hvd_vote(task, 0))
                                                      : wait_for_verdict(task, timeout);
}

static PyObject *call_resume(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "resume(task, timeout)");
        return NULL;
    }
    task_t *task = PyLong_AsVoidPtr(args[0]);
    int64_t timeout = PyLong_AsLongLong(args[1]);
    return PyErr_Occurred() ? NULL : wait_for_verdict(task, timeout);
}

static PyMethodDef CALLS[] = {
    {"vote", (PyCFunction)(void (*)(void))call_vote, METH_FASTCALL, "Vote on a task."},
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
