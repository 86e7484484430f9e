/* Takes what PyInit_... of a module with multi-phase initialisation returned; the methods that no code names go. */
PyObject *with_named_methods(PyObject *definition);
