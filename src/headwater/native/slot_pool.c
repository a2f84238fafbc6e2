/* The slots of one tier and the state of each: the operations that every request uses.
 *
 * `headwater.cache.pool` has the same class in Python and says what each operation means. In numpy
 * one operation is three to six calls of about 1 µs; here it is one pass over the slots. Errors
 * are explained in Python: an operation that finds a slot in an unexpected state undoes what it
 * did and calls the method `explain`, which raises.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>
#include <stdint.h>
#include <string.h>

enum { FREE, HELD, CACHED, MOVING, QUARANTINED, NUM_STATES };

typedef struct {
    PyObject_HEAD
    Py_ssize_t num_slots;
    Py_ssize_t num_free;
    Py_ssize_t counts[NUM_STATES];
    Py_ssize_t num_reads;      /* sum of `readers` */
    Py_ssize_t num_lost_reads; /* how many of them belong to writes that timed out */
    int64_t *free;             /* a stack: free[0 .. num_free), the last one is taken next */
    uint8_t *state;
    int32_t *readers;          /* how many writes to storage read each slot */
} Pool;

static int64_t *values(PyObject *array) { return PyArray_DATA((PyArrayObject *)array); }
static Py_ssize_t length(PyObject *array) { return PyArray_DIM((PyArrayObject *)array, 0); }

static int is_dense(PyObject *slots)
{
    return PyArray_Check(slots) && PyArray_TYPE((PyArrayObject *)slots) == NPY_INT64 &&
           PyArray_NDIM((PyArrayObject *)slots) == 1 && PyArray_ISCARRAY_RO((PyArrayObject *)slots);
}

/* `slots` as a dense array of int64; a new reference, usually to `slots` itself. */
static PyObject *dense(PyObject *slots)
{
    return is_dense(slots) ? Py_NewRef(slots)
                           : PyArray_FROMANY(slots, NPY_INT64, 1, 1, NPY_ARRAY_CARRAY_RO);
}

static PyObject *new_array(Py_ssize_t count)
{
    npy_intp size = count;
    return PyArray_SimpleNew(1, &size, NPY_INT64);
}

/* Raise what `Pool.explain(slots, old)` says about slots in an unexpected state. */
static PyObject *explain(Pool *pool, PyObject *slots, long old)
{
    PyObject *done = PyObject_CallMethod((PyObject *)pool, "explain", "Ol", slots, old);
    Py_XDECREF(done);
    if (done != NULL)
        PyErr_SetString(PyExc_SystemError, "a pool found an error and did not explain it");
    return NULL;
}

/* Give `count` slots the state `new`, or change nothing and return 0. Marking a slot at once finds
 * one that is named twice. */
static int mark(Pool *pool, const int64_t *slots, Py_ssize_t count, long old, long new)
{
    uint8_t *state = pool->state;
    const uint8_t scratch = NUM_STATES;
    Py_ssize_t at = 0;
    for (; at < count; at++) {
        const uint64_t slot = (uint64_t)slots[at];
        if (slot >= (uint64_t)pool->num_slots || state[slot] != old)
            break;
        state[slot] = scratch;
    }
    const long final = at == count ? new : old;
    for (Py_ssize_t i = 0; i < at; i++)
        state[slots[i]] = (uint8_t)final;
    return at == count;
}

/* End an operation on `slots`, which are released: None, or the explained error. */
static PyObject *finish(Pool *pool, PyObject *slots, int done, long old)
{
    if (!done)
        explain(pool, slots, old);
    Py_DECREF(slots);
    return done ? Py_NewRef(Py_None) : NULL;
}

static void count_move(Pool *pool, Py_ssize_t count, long old, long new)
{
    pool->counts[old] -= count;
    pool->counts[new] += count;
}

static int parse_state(PyObject *object, long *state)
{
    *state = PyLong_AsLong(object);
    if (*state >= 0 && *state < NUM_STATES)
        return 1;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "not a state of a slot");
    return 0;
}

static int require_args(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most)
{
    if (given >= least && given <= most)
        return 1;
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return 0;
}

static PyObject *pool_take(Pool *pool, PyObject *const *args, Py_ssize_t given)
{
    long state = HELD;
    if (!require_args(given, 1, 2) || (given == 2 && !parse_state(args[1], &state)))
        return NULL;
    const Py_ssize_t count = PyLong_AsSsize_t(args[0]);
    if (count < 0)
        return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)pool, "refuse", "n", count);
    if (count > pool->num_free)
        Py_RETURN_NONE;
    PyObject *taken = new_array(count);
    if (taken == NULL)
        return NULL;
    pool->num_free -= count;
    memcpy(values(taken), pool->free + pool->num_free, (size_t)count * sizeof(int64_t));
    for (Py_ssize_t i = 0; i < count; i++)
        pool->state[values(taken)[i]] = (uint8_t)state;
    count_move(pool, count, FREE, state);
    return taken;
}

static PyObject *pool_move(Pool *pool, PyObject *const *args, Py_ssize_t given)
{
    long old, new;
    if (!require_args(given, 3, 3) || !parse_state(args[1], &old) || !parse_state(args[2], &new))
        return NULL;
    PyObject *slots = dense(args[0]);
    if (slots == NULL)
        return NULL;
    const Py_ssize_t count = length(slots);
    const int done = mark(pool, values(slots), count, old, new);
    if (done)
        count_move(pool, count, old, new);
    return finish(pool, slots, done, old);
}

/* The number of slots in the arrays of a list, or -1. */
static Py_ssize_t total_length(PyObject *parts)
{
    if (!PyList_Check(parts)) {
        PyErr_SetString(PyExc_TypeError, "the parts must be a list");
        return -1;
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts); i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        if (!is_dense(part)) {
            PyErr_SetString(PyExc_TypeError, "each part must be a dense array of int64");
            return -1;
        }
        total += length(part);
    }
    return total;
}

static void join(PyObject *parts, int64_t *joined)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts); i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        memcpy(joined, values(part), (size_t)length(part) * sizeof(int64_t));
        joined += length(part);
    }
}

/* The arrays of a list as one array; a single one is not copied. */
static PyObject *pool_joined(Pool *pool, PyObject *parts)
{
    const Py_ssize_t total = total_length(parts);
    if (total < 0)
        return NULL;
    if (PyList_GET_SIZE(parts) == 1)
        return Py_NewRef(PyList_GET_ITEM(parts, 0));
    PyObject *slots = new_array(total);
    if (slots != NULL)
        join(parts, values(slots));
    return slots;
}

static PyObject *pool_reuse(Pool *pool, PyObject *const *args, Py_ssize_t given)
{
    long old, new;
    if (!require_args(given, 3, 3) || !parse_state(args[1], &old) || !parse_state(args[2], &new))
        return NULL;
    const Py_ssize_t evicted = total_length(args[0]), num_free = pool->num_free;
    PyObject *slots = evicted < 0 ? NULL : new_array(num_free + evicted);
    if (slots == NULL)
        return NULL;
    memcpy(values(slots), pool->free, (size_t)num_free * sizeof(int64_t));
    join(args[0], values(slots) + num_free);
    if (!mark(pool, values(slots) + num_free, evicted, old, new)) {
        PyObject *wrong = PySequence_GetSlice(slots, num_free, num_free + evicted);
        Py_DECREF(slots);
        return wrong == NULL ? NULL : finish(pool, wrong, 0, old);
    }
    for (Py_ssize_t i = 0; i < num_free; i++)
        pool->state[values(slots)[i]] = (uint8_t)new;
    count_move(pool, evicted, old, new);
    count_move(pool, num_free, FREE, new);
    pool->num_free = 0;
    return slots;
}

/* Put slots, which are marked already, on the free stack; those being read are quarantined. */
static void push_free(Pool *pool, const int64_t *slots, Py_ssize_t count, long old)
{
    Py_ssize_t freed = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (pool->num_reads && pool->readers[slots[i]]) {
            pool->state[slots[i]] = QUARANTINED;
        } else {
            pool->free[pool->num_free + freed] = slots[i];
            freed++;
        }
    }
    pool->num_free += freed;
    count_move(pool, freed, old, FREE);
    count_move(pool, count - freed, old, QUARANTINED);
}

static PyObject *pool_free(Pool *pool, PyObject *const *args, Py_ssize_t given)
{
    long old;
    if (!require_args(given, 2, 2) || !parse_state(args[1], &old))
        return NULL;
    PyObject *slots = dense(args[0]);
    if (slots == NULL)
        return NULL;
    const Py_ssize_t count = length(slots);
    const int done = mark(pool, values(slots), count, old, FREE);
    if (done)
        push_free(pool, values(slots), count, old);
    return finish(pool, slots, done, old);
}

static PyObject *pool_begin_read(Pool *pool, PyObject *array)
{
    PyObject *slots = dense(array);
    if (slots == NULL)
        return NULL;
    const Py_ssize_t count = length(slots);
    const int done = mark(pool, values(slots), count, CACHED, CACHED);
    if (done) {
        for (Py_ssize_t i = 0; i < count; i++)
            pool->readers[values(slots)[i]]++;
        pool->num_reads += count;
    }
    return finish(pool, slots, done, CACHED);
}

static PyObject *pool_lose_read(Pool *pool, PyObject *array)
{
    const Py_ssize_t count = PyObject_Length(array);
    if (count < 0)
        return NULL;
    pool->num_lost_reads += count;
    Py_RETURN_NONE;
}

/* Slots that lost their block while they were read become free, in the order of `slots`. */
static PyObject *pool_end_read(Pool *pool, PyObject *const *args, Py_ssize_t given)
{
    if (!require_args(given, 1, 2))
        return NULL;
    const int was_lost = given == 2 ? PyObject_IsTrue(args[1]) : 0;
    PyObject *slots = was_lost < 0 ? NULL : dense(args[0]);
    if (slots == NULL)
        return NULL;
    const Py_ssize_t count = length(slots);
    for (Py_ssize_t i = 0; i < count; i++)
        if ((uint64_t)values(slots)[i] >= (uint64_t)pool->num_slots)
            return finish(pool, slots, 0, CACHED);
    pool->num_reads -= count;
    if (was_lost)
        pool->num_lost_reads -= count;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t slot = values(slots)[i];
        if (--pool->readers[slot] || pool->state[slot] != QUARANTINED)
            continue;
        pool->state[slot] = FREE;
        pool->free[pool->num_free++] = slot;
        count_move(pool, 1, QUARANTINED, FREE);
    }
    return finish(pool, slots, 1, CACHED);
}

static PyObject *pool_has_lost_read(Pool *pool, PyObject *array)
{
    if (!pool->num_lost_reads)
        Py_RETURN_FALSE;
    PyObject *slots = dense(array);
    if (slots == NULL)
        return NULL;
    int found = 0;
    for (Py_ssize_t i = 0; i < length(slots) && !found; i++) {
        const uint64_t slot = (uint64_t)values(slots)[i];
        found = slot < (uint64_t)pool->num_slots && pool->readers[slot] > 0;
    }
    Py_DECREF(slots);
    return PyBool_FromLong(found);
}

/* Take these slots, which must be free, off the stack: for the start of an engine. */
static PyObject *pool_claim(Pool *pool, PyObject *const *args, Py_ssize_t given)
{
    long state;
    if (!require_args(given, 2, 2) || !parse_state(args[1], &state))
        return NULL;
    PyObject *slots = dense(args[0]);
    if (slots == NULL)
        return NULL;
    const Py_ssize_t count = length(slots);
    const int done = mark(pool, values(slots), count, FREE, state);
    if (done) {
        Py_ssize_t left = 0;
        for (Py_ssize_t i = 0; i < pool->num_free; i++)
            if (pool->state[pool->free[i]] == FREE)
                pool->free[left++] = pool->free[i];
        pool->num_free = left;
        count_move(pool, count, FREE, state);
    }
    return finish(pool, slots, done, FREE);
}

static PyObject *copied(const void *from, Py_ssize_t count, int type, size_t width)
{
    npy_intp size = count;
    PyObject *array = PyArray_SimpleNew(1, &size, type);
    if (array != NULL)
        memcpy(PyArray_DATA((PyArrayObject *)array), from, (size_t)count * width);
    return array;
}

static PyObject *pool_states(Pool *pool, PyObject *unused)
{
    return copied(pool->state, pool->num_slots, NPY_UINT8, 1);
}

static PyObject *pool_free_slots(Pool *pool, PyObject *unused)
{
    return copied(pool->free, pool->num_free, NPY_INT64, sizeof(int64_t));
}

static PyObject *pool_readers(Pool *pool, PyObject *unused)
{
    return copied(pool->readers, pool->num_slots, NPY_INT32, sizeof(int32_t));
}

static PyObject *pool_counts(Pool *pool, PyObject *unused)
{
    const Py_ssize_t *n = pool->counts;
    return Py_BuildValue("(nnnnn)", n[0], n[1], n[2], n[3], n[4]);
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"num_slots", NULL};
    Py_ssize_t num_slots;
    if (!PyArg_ParseTupleAndKeywords(args, named, "n", names, &num_slots))
        return NULL;
    Pool *pool = (Pool *)type->tp_alloc(type, 0);
    if (pool == NULL)
        return NULL;
    if (num_slots < 0) {
        PyObject *done = PyObject_CallMethod((PyObject *)pool, "refuse", "n", num_slots);
        Py_XDECREF(done);
        Py_DECREF(pool);
        return NULL;
    }
    const size_t size = (size_t)num_slots + 1; /* never zero bytes */
    pool->free = PyMem_Malloc(size * sizeof(int64_t));
    pool->state = PyMem_Calloc(size, 1);
    pool->readers = PyMem_Calloc(size, sizeof(int32_t));
    if (pool->free == NULL || pool->state == NULL || pool->readers == NULL) {
        Py_DECREF(pool);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < num_slots; i++)
        pool->free[i] = i;
    pool->num_slots = pool->num_free = pool->counts[FREE] = num_slots;
    return (PyObject *)pool;
}

static void pool_dealloc(Pool *pool)
{
    PyMem_Free(pool->free);
    PyMem_Free(pool->state);
    PyMem_Free(pool->readers);
    Py_TYPE(pool)->tp_free((PyObject *)pool);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))pool_##name, METH_FASTCALL, NULL}
#define ONE(name) {#name, (PyCFunction)pool_##name, METH_O, NULL}
#define NONE(name) {#name, (PyCFunction)pool_##name, METH_NOARGS, NULL}

static PyMethodDef pool_methods[] = {
    FAST(take),       FAST(move),      FAST(reuse),         FAST(free),    FAST(end_read),
    FAST(claim),      ONE(begin_read), ONE(lose_read),      ONE(has_lost_read),
    ONE(joined),
    NONE(states),     NONE(free_slots), NONE(readers),      NONE(counts),  {NULL},
};

static PyMemberDef pool_members[] = {
    {"num_slots", T_PYSSIZET, offsetof(Pool, num_slots), READONLY, NULL},
    {"num_free", T_PYSSIZET, offsetof(Pool, num_free), READONLY, NULL},
    {"num_reads", T_PYSSIZET, offsetof(Pool, num_reads), READONLY, NULL},
    {"num_lost_reads", T_PYSSIZET, offsetof(Pool, num_lost_reads), READONLY, NULL},
    {NULL},
};

static PyTypeObject pool_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "slot_pool.Pool",
    .tp_basicsize = sizeof(Pool),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = pool_new,
    .tp_dealloc = (destructor)pool_dealloc,
    .tp_methods = pool_methods,
    .tp_members = pool_members,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "slot_pool", .m_size = -1};

PyMODINIT_FUNC PyInit_slot_pool(void)
{
    import_array();
    if (PyType_Ready(&pool_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Pool", (PyObject *)&pool_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
