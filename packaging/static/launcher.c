/*
 * launcher.c - starts the Python program that is frozen into fusermount3-proxy.
 *
 * It does everything that must precede the interpreter, in this order: drop a setuid bit's privilege, ensure
 * that descriptors 0-2 are open, and, in the watcher process of auto_unmount, wait. In any other process, it lets
 * fast_path.c carry out the call, which succeeds if the call is plain. All decisions are made in Python.
 *
 * The interpreter is initialized up to its "core" phase only (PyConfig._init_main = 0): built-in and frozen
 * modules can be imported, but there is no sys.path and no sys.stdout, and it opens no file. So the program
 * starts fast, and runs in an image that contains nothing else.
 */
#define _GNU_SOURCE
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fast_path.h"
#include "omitted.h"
#include "protocol.h"

#define PROGRAM_MODULE "fusermount3_proxy.cli"

PyMODINIT_FUNC PyInit__imp(void);
PyMODINIT_FUNC PyInit__signal(void);
PyMODINIT_FUNC PyInit__socket(void);
PyMODINIT_FUNC PyInit_errno(void);
PyMODINIT_FUNC PyInit_posix(void);
PyMODINIT_FUNC PyInit_time(void);

/*
 * The main phase, which the launcher omits, would have called these two: without them the import of _signal
 * crashes, and so does a UnicodeError since 3.13 (before, the codec registry initialized itself).
 */
extern int _PySignal_Init(int install_signal_handlers);
#if PY_VERSION_HEX >= 0x030d0000
extern PyStatus _PyCodec_InitRegistry(PyInterpreterState *interpreter);
#endif

static PyObject *init_posix(void)
{
    return with_named_methods(PyInit_posix());
}

static PyObject *init_time(void)
{
    return with_named_methods(PyInit_time());
}

static PyObject *init_signal(void)
{
    return _PySignal_Init(0) == 0 ? PyInit__signal() : NULL;
}

/* The built-in modules: those that the program may import, then those that the core requires. */
struct _inittab _PyImport_Inittab[] = {
    {"posix", init_posix},
    {"_socket", PyInit__socket},
    {"errno", PyInit_errno},
    {"time", init_time},
    {"_signal", init_signal},

    {"_imp", PyInit__imp},
    {"builtins", NULL},
    {"sys", NULL},
    {NULL, NULL},
};

/* The proxy replaces a program that is installed setuid, and needs no privilege itself. */
static void drop_privilege(void)
{
    uid_t ruid, euid, suid;
    gid_t rgid, egid, sgid;

    if (getresuid(&ruid, &euid, &suid) != 0 || getresgid(&rgid, &egid, &sgid) != 0)
        _exit(1);
    if (euid == ruid && suid == ruid && egid == rgid && sgid == rgid)
        return;
    /* The group first: after dropping the user ID, the process may not change its group. */
    if (setresgid(rgid, rgid, rgid) != 0 || setresuid(ruid, ruid, ruid) != 0)
        _exit(1);
    if (getresuid(&ruid, &euid, &suid) != 0 || getresgid(&rgid, &egid, &sgid) != 0)
        _exit(1);
    if (euid != ruid || suid != ruid || egid != rgid || sgid != rgid)
        _exit(1);
}

/* Otherwise a socket could get number 2, and the next error message would be written to it. */
static void reopen_closed_stdio(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) != -1 || errno != EBADF)
            continue;
        /* An image may lack /dev/null, but not "/"; with O_PATH, I/O fails as on a closed descriptor. */
        if (open("/dev/null", O_RDWR) != fd && open("/", O_PATH) != fd)
            _exit(1);
    }
}

/*
 * Returns the comm socket's number, or -1 if this process is not the watcher. The Python side sets the variable and
 * executes itself.
 */
static int watched_socket(void)
{
    const char *text = getenv(WATCH_VARIABLE);
    char *end;
    int type;
    socklen_t size = sizeof type;

    if (text == NULL || *text < '0' || *text > '9')
        return -1;
    errno = 0;
    long fd = strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || fd > INT_MAX)
        return -1;
    return getsockopt((int)fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 ? (int)fd : -1;
}

/*
 * Waits until the other end of the socket is closed, that is, until the FUSE program is gone. There is one
 * watcher per mount, perhaps for months: at this point it has touched only a few pages of memory.
 */
static void wait_for_close(int fd)
{
    for (;;) {
        struct pollfd readable = {.fd = fd, .events = POLLIN};
        char discarded[256];

        /* The FUSE program may have made the socket non-blocking, so poll does the waiting. */
        poll(&readable, 1, -1);
        ssize_t size = recv(fd, discarded, sizeof discarded, MSG_DONTWAIT);
        if (size == 0 || (size < 0 && errno != EINTR && errno != EAGAIN))
            return;
    }
}

static _Noreturn void fail(const char *program, const char *what, const char *why)
{
    dprintf(STDERR_FILENO, "%s: internal error: %s: %s\n", program, what, why);
    _exit(1);
}

/*
 * pymalloc's map of 128 KB would just fit into the first 132 KB of glibc's heap, and calloc would clear it, page by
 * page. If it does not fit, calloc maps it, and nearly all of its pages are never touched.
 */
static void take_room_for_map(void)
{
    static void *volatile room; /* else the compiler omits it */

    room = malloc(16 * 1024);
    (void)room;
}

/*
 * The interpreter's types are in .data, and it writes to all of its pages: one call replaces 80 page faults.
 * If the kernel does not support the call (before Linux 5.14), or has larger pages, the faults occur one by one.
 */
static void copy_data_pages(void)
{
    extern char data_start[], edata[]; /* defined by the linker */
    const uintptr_t page = 4096, first = (uintptr_t)data_start & -page;

    madvise((void *)first, (uintptr_t)edata - first, MADV_POPULATE_WRITE);
}

/* Isolated: no environment variable, file or signal handler affects the interpreter. */
static void start_python(const char *program)
{
    PyPreConfig preconfig;
    PyConfig config;

    PyPreConfig_InitIsolatedConfig(&preconfig);
    preconfig.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&preconfig);

    if (!PyStatus_Exception(status)) {
        PyConfig_InitIsolatedConfig(&config);
        config._init_main = 0;
        config.site_import = 0;
        config.write_bytecode = 0;
        /* A process that serves one request of its own caller needs no random hashes, so no getrandom. */
        config.use_hash_seed = 1;
        config.hash_seed = 0;
        status = Py_InitializeFromConfig(&config);
    }
#if PY_VERSION_HEX >= 0x030d0000
    if (!PyStatus_Exception(status))
        status = _PyCodec_InitRegistry(PyInterpreterState_Get());
#endif
    if (PyStatus_Exception(status))
        fail(program, status.func ? status.func : "start", status.err_msg ? status.err_msg : "unknown");
}

/*
 * Sets sys.argv, which the core phase leaves unset. Bytes that are not UTF-8 become lone surrogates, as in any Python.
 * sys.frozen tells the program that it may execute itself; sys.asked, if not negative, is the connection on which the
 * request has been sent.
 */
static int set_up_sys(int argc, char *const argv[], int asked)
{
    PyObject *list = PyList_New(argc);

    if (list == NULL)
        return -1;
    for (int i = 0; i < argc; i++) {
        PyObject *argument = PyUnicode_DecodeUTF8(argv[i], (Py_ssize_t)strlen(argv[i]), "surrogateescape");
        if (argument == NULL)
            return -1;
        PyList_SET_ITEM(list, i, argument);
    }
    PyObject *number = PyLong_FromLong(asked);
    if (number == NULL || PySys_SetObject("asked", number) != 0 || PySys_SetObject("frozen", Py_True) != 0)
        return -1;
    return PySys_SetObject("argv", list);
}

/* Returns the result of main(), or -1 with an exception set if main() did not return. */
static int run_main(int argc, char *const argv[], int asked)
{
    if (set_up_sys(argc, argv, asked) != 0)
        return -1;
    PyObject *module = PyImport_ImportModule(PROGRAM_MODULE);
    if (module == NULL)
        return -1;
    PyObject *result = PyObject_CallMethod(module, "main", NULL);
    if (result == NULL)
        return -1;
    return (int)PyLong_AsLong(result);
}

/* Without sys.stderr, no traceback can be printed. */
static _Noreturn void fail_with_exception(const char *program)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *text = PyObject_Str(value);
    PyObject *bytes = text ? PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace") : NULL;
    fail(program, Py_TYPE(value)->tp_name, bytes ? PyBytes_AS_STRING(bytes) : "?");
}

int main(int argc, char *argv[])
{
    static char *const no_argv[] = {"fusermount", NULL};
    char *const *arguments = argv;

    drop_privilege();
    reopen_closed_stdio();
    if (argc == 0) {
        argc = 1;
        arguments = no_argv;
    }
    int watched = watched_socket(), asked = -1;
    if (watched >= 0) {
        /* The watcher executed /proc/self/exe; process lists should show it under the name of the original call. */
        prctl(PR_SET_NAME, basename(arguments[0]));
        wait_for_close(watched);
    } else {
        asked = fast_path(argc, arguments);
    }

    copy_data_pages();
    take_room_for_map();
    start_python(arguments[0]);
    int code = run_main(argc, arguments, asked);
    if (PyErr_Occurred())
        fail_with_exception(arguments[0]);
    /* The kernel frees memory faster than the interpreter does. */
    _exit(code);
}
