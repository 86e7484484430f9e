/*
 * omitted.c - skips initialization that the interpreter does at each start and this program never needs.
 *
 * The linker redirects the calls of three functions to this file (--wrap, build.py). An object counts as used if
 * the frozen code mentions its name: build.py writes these names, sorted, into frozen.c, so they follow the program.
 */
#include <Python.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "omitted.h"

extern const char *const named[];
extern const size_t named_count;

/*
 * The interpreter's own types, by tp_name, that have no instances in this program: they belong to modules that
 * the executable does not have (_weakref, _contextvars, _collections, ...), to coroutines, which build.py
 * refuses to freeze, or to a builtin, which is made ready if the program names it.
 */
static const char *const unused_types[] = {
    "InterpreterID",
    "_contextvars.Context",
    "_contextvars.ContextVar",
    "anext_awaitable",
    "async_generator",
    "async_generator_asend",
    "async_generator_athrow",
    "async_generator_wrapped_value",
    "bytearray",
    "bytearray_iterator",
    "collections.OrderedDict",
    "complex",
    "coroutine",
    "coroutine_wrapper",
    "hamt",
    "hamt_array_node",
    "hamt_bitmap_node",
    "hamt_collision_node",
    "instancemethod",
    "managedbuffer",
    "memory_iterator",
    "memoryview",
    "odict_items",
    "odict_iterator",
    "odict_keys",
    "odict_values",
    "pickle.PickleBuffer",
    "stderrprinter",
    "symtable entry",
    "weakref.CallableProxyType",
    "weakref.ProxyType",
};

static int compare(const void *name, const void *entry)
{
    return strcmp(name, *(const char *const *)entry);
}

static bool is_among(const char *name, const char *const *names, size_t count)
{
    return bsearch(name, names, count, sizeof *names, compare) != NULL;
}

static bool is_named(const char *name)
{
    return is_among(name, named, named_count);
}

/*
 * The process ends after one request; its garbage costs less than the collections, several of which would otherwise
 * run while the interpreter starts.
 */
PyStatus __real__PyGC_Init(PyInterpreterState *interpreter);
PyStatus __wrap__PyGC_Init(PyInterpreterState *interpreter)
{
    PyGC_Disable();
    return __real__PyGC_Init(interpreter);
}

int __real_PyType_Ready(PyTypeObject *type);
int __wrap_PyType_Ready(PyTypeObject *type)
{
    if (is_among(type->tp_name, unused_types, Py_ARRAY_LENGTH(unused_types)) && !is_named(type->tp_name))
        return 0;
    return __real_PyType_Ready(type);
}

int __real_PyModule_AddIntConstant(PyObject *module, const char *name, long value);
int __wrap_PyModule_AddIntConstant(PyObject *module, const char *name, long value)
{
    return is_named(name) ? __real_PyModule_AddIntConstant(module, name, value) : 0;
}

PyObject *with_named_methods(PyObject *definition)
{
    PyMethodDef *kept = ((PyModuleDef *)definition)->m_methods;

    for (const PyMethodDef *method = kept; method->ml_name != NULL; method++)
        if (is_named(method->ml_name))
            *kept++ = *method;
    *kept = (PyMethodDef){.ml_name = NULL};
    return definition;
}
