/*
 * superblock.h - a process that creates the superblock of a FUSE filesystem, perhaps among those of a container.
 *
 * The kernel takes the pid namespace from the process that creates the superblock (fs/fuse/inode.c, fuse_fill_super),
 * so that process must be in the container's pid namespace, and the container sees it. A container may take over every
 * process that it sees. Therefore create_superblock() confines its process before it has a child there, and with it the
 * child, to the system calls that remain: it can create that superblock, and end.
 *
 * This needs no libc.
 */
#include <asm/unistd.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/errno.h>
#include <linux/filter.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#if __STDC_HOSTED__
#include <signal.h>
#else
#include <linux/signal.h>
#endif

#if !defined(CMD_CREATE) || !defined(CMD_CREATE_EXCL)
#error "packaging/superblock_creator.py defines the commands as fusermount3_broker.kernel.syscalls has them"
#endif

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64

static long call(long number, long a, long b, long c, long d, long e)
{
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e;
    long result;

    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64

static long call(long number, long a, long b, long c, long d, long e)
{
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c, x3 __asm__("x3") = d, x4 __asm__("x4") = e;

    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
}
#else
#error "unknown architecture"
#endif

static _Noreturn void end(long status)
{
    for (;;)
        call(__NR_exit_group, status, 0, 0, 0, 0);
}

/* Ends the program if the system call fails. */
static long must(long number, long a, long b, long c, long d, long e)
{
    long result = call(number, a, b, c, d, e);

    if (result < 0)
        end(-result);
    return result;
}

/* Closes all descriptors but these; -1 is none. */
static void close_all_but(const long keep[], size_t count)
{
    for (long first = 0;;) {
        long next = -1;
        for (size_t i = 0; i < count; i++)
            if (keep[i] >= first && (next < 0 || keep[i] < next))
                next = keep[i];
        if (next < 0) {
            must(__NR_close_range, first, ~0U, 0, 0, 0);
            return;
        }
        if (next > first)
            must(__NR_close_range, first, next - 1, 0, 0, 0);
        first = next + 1;
    }
}

/* A program that root executes gets back what the bounding set holds. */
static void drop_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = 1U << CAP_SYS_ADMIN, .permitted = 1U << CAP_SYS_ADMIN},
    };

    must(__NR_capset, (long)&header, (long)data, 0, 0, 0);
}

static void die_with_parent(void)
{
    must(__NR_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define SKIP_IF(value, count) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, count, 0)
#define SKIP_UNLESS(value, count) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, count)
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define REFUSE BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
/* The low word of an argument; both architectures are little-endian. */
#define ALLOW_CALL(number) SKIP_UNLESS(number, 1), ALLOW
#define ALLOW_CALL_IF(number, argument, value) \
    SKIP_UNLESS(number, 4), LOAD(args[argument]), SKIP_UNLESS(value, 1), ALLOW, REFUSE
#define ALLOW_CALL_IF_EITHER(number, argument, value, other) \
    SKIP_UNLESS(number, 6), LOAD(args[argument]), SKIP_UNLESS(value, 1), ALLOW, SKIP_UNLESS(other, 1), ALLOW, REFUSE

/* Confines this process and its children to creating a superblock, having a child and exiting, for good. */
static void confine(void)
{
    static const struct sock_filter filter[] = {
        LOAD(arch),
        SKIP_IF(ARCHITECTURE, 1),
        REFUSE,
        LOAD(nr),
        ALLOW_CALL(__NR_exit_group),
        ALLOW_CALL(__NR_wait4),
        ALLOW_CALL_IF(__NR_clone, 0, SIGCHLD),
        ALLOW_CALL_IF(__NR_prctl, 0, PR_SET_PDEATHSIG),
        ALLOW_CALL_IF_EITHER(__NR_fsconfig, 1, CMD_CREATE, CMD_CREATE_EXCL),
        REFUSE,
    };
    const struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = (struct sock_filter *)filter};

    must(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    must(__NR_seccomp, SECCOMP_SET_MODE_FILTER, 0, (long)&program, 0, 0);
}

/* Returns 0 or an errno. */
static long create(long context, const long commands[])
{
    long result = -EOPNOTSUPP;

    for (; result == -EOPNOTSUPP && *commands != 0; commands++)
        result = call(__NR_fsconfig, context, *commands, 0, 0, 0);
    return -result;
}

/* Creates the superblock in a child, which is in the pid namespace that this process has joined for its children. */
static long create_in_child(long context, const long commands[])
{
    int status;
    long result, child = must(__NR_clone, SIGCHLD, 0, 0, 0, 0);

    if (child == 0) {
        die_with_parent();
        end(create(context, commands));
    }
    do
        result = call(__NR_wait4, child, (long)&status, 0, 0, 0);
    while (result == -EINTR);
    if (result < 0)
        return -result;
    return (status & 0x7f) == 0 ? status >> 8 & 0xff : EINTR; /* wait(2): exited, or killed by a signal */
}

/*
 * Creates the superblock of `context`, a descriptor of fsopen(2) configured to use the descriptor `device`, and ends
 * this process with 0 or the errno of the step that failed. `directory` is where to work: nothing there is secret, and
 * no lookup blocks. `pid_namespace` is that of the container, or -1: then this process creates the superblock itself.
 * The `commands`, up to a 0, are those of fsconfig(2); each one is only tried if the kernel lacks the one before.
 */
static _Noreturn void create_superblock(long directory, long pid_namespace, long device, long context,
                                        const long commands[])
{
    const long keep[] = {directory, pid_namespace, device, context};

    close_all_but(keep, sizeof keep / sizeof *keep);
    drop_capabilities();
    must(__NR_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
    die_with_parent();
    must(__NR_fchdir, directory, 0, 0, 0, 0);
    must(__NR_close, directory, 0, 0, 0, 0);
    if (pid_namespace < 0) {
        confine();
        end(create(context, commands));
    }
    must(__NR_setns, pid_namespace, CLONE_NEWPID, 0, 0, 0);
    must(__NR_close, pid_namespace, 0, 0, 0, 0);
    confine();
    end(create_in_child(context, commands));
}
