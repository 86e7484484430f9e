/*
 * confined.c NAME - confines itself as superblock_creator does, and tries something. The exit status is the errno, or 0.
 * Without NAME, it prints what it can try.
 */
#define TESTED
#include "superblock_creator.c"

#define NO_DESCRIPTOR 1000000

static const struct attempt {
    const char *name;
    long number;
    long arguments[5];
} attempts[] = {
    {"be unconfined", __NR_getpid, {0}},
    {"open", __NR_openat, {-100, (long)"/", 0}},
    {"open a path", __NR_openat, {-100, (long)"/", 010000000}},
    {"read", __NR_read, {0, 0, 0}},
    {"write", __NR_write, {1, (long)"x", 1}},
    {"copy a descriptor", __NR_dup, {0}},
    {"mount", __NR_mount, {(long)"tmpfs", (long)"/", (long)"tmpfs", 0, 0}},
    {"unmount", __NR_umount2, {(long)"/", 2}},
    {"open a filesystem", __NR_fsopen, {(long)"tmpfs", 0}},
    {"make a mount", __NR_fsmount, {0, 0, 0}},
    {"move a mount", __NR_move_mount, {0, (long)"", 0, (long)"", 0}},
    {"copy a mount", __NR_open_tree, {-100, (long)"/", 1}},
    {"join namespaces", __NR_setns, {0, 0x00020000}},
    {"make namespaces", __NR_unshare, {0x00020000}},
    {"have a child in new namespaces", __NR_clone, {SIGCHLD | 0x10000000, 0, 0, 0, 0}},
    {"have a child that shares memory", __NR_clone, {SIGCHLD | 0x00000100 | 0x00004000, 0, 0, 0, 0}},
    {"execute", __NR_execve, {(long)"/bin/true", 0, 0}},
    {"send a signal", __NR_kill, {0, 0}},
    {"trace", __NR_ptrace, {0, 0, 0, 0}},
    {"make a socket", __NR_socket, {1, 1, 0}},
    {"send", __NR_sendmsg, {0, 0, 0}},
    {"become somebody", __NR_setuid, {0}},
    {"get capabilities", __NR_capset, {0, 0}},
    {"be dumpable", __NR_prctl, {PR_SET_DUMPABLE, 1}},
    {"map memory", __NR_mmap, {0, 4096, 7, 0x22, -1}},
    {"configure a filesystem", __NR_fsconfig, {0, 0, (long)"allow_other", 0, 0}},
    {"reconfigure a filesystem", __NR_fsconfig, {0, 7, 0, 0, 0}},
    {"create a filesystem", __NR_fsconfig, {NO_DESCRIPTOR, CMD_CREATE, 0, 0, 0}},
    {"create a new filesystem", __NR_fsconfig, {NO_DESCRIPTOR, CMD_CREATE_EXCL, 0, 0, 0}},
    {"create a filesystem in a child", -1, {0}},
};

static size_t length_of(const char *text)
{
    size_t length = 0;

    while (text[length] != '\0')
        length++;
    return length;
}

static int are_equal(const char *one, const char *other)
{
    while (*one != '\0' && *one == *other)
        one++, other++;
    return *one == *other;
}

static _Noreturn void try(const struct attempt *one)
{
    static const long commands[] = {CMD_CREATE, 0};
    const long *a = one->arguments;

    if (one > attempts)
        confine();
    if (one->number == -1)
        end(create_in_child(NO_DESCRIPTOR, commands));
    long result = call(one->number, a[0], a[1], a[2], a[3], a[4]);
    end(result < 0 ? -result : 0);
}

static _Noreturn void run(long count, const char *const arguments[])
{
    for (size_t i = 0; i < sizeof attempts / sizeof *attempts; i++) {
        if (count < 2) {
            call(__NR_write, 1, (long)attempts[i].name, length_of(attempts[i].name), 0, 0);
            call(__NR_write, 1, (long)"\n", 1, 0, 0);
        } else if (are_equal(arguments[1], attempts[i].name)) {
            try(&attempts[i]);
        }
    }
    end(count < 2 ? 0 : 255);
}
