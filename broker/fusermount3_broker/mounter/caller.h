/*
 * caller.h - the caller of plain_call: who it is, by the kernel's word, and its namespaces, which this process joins.
 * The functions do as those of caller_namespaces.py and namespaces.py that they name. All end the operation if they
 * fail.
 */
#include <grp.h>
#include <limits.h>
#include <sched.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#define BIT(number) (UINT64_C(1) << (number))

static const char JOIN[] = "join";

/* Descriptors of kept_descriptors.py, and the pids of the broker's processes that are no callers. */
static int proc, devices, supervisor;
static pid_t front;

static struct {
    uid_t uid;
    gid_t gid;
    int device, pid_namespace;
    unsigned pids;
    ino_t mount_namespace;
    bool locks_flags, may_mount;
} caller = {.device = NONE, .pid_namespace = NONE};

/* Reads a file of this process's or another's in /proc; `text` is empty if it can't be read. */
static void read_file(const char *name, long of, char *text, size_t size)
{
    char path[64];

    snprintf(path, sizeof path, name, of);
    int file = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, size - 1);
    text[length > 0 ? length : 0] = '\0';
    if (file >= 0)
        close(file);
}

/* Returns the number that follows `name` in `text`, or 0. */
static uint64_t number_after(const char *name, const char *text, int base)
{
    const char *found = strstr(text, name);

    return found != NULL ? strtoull(found + strlen(name), NULL, base) : 0;
}

static bool is_same_file(int descriptor, const char *path)
{
    struct stat one, other;

    return fstat(descriptor, &one) == 0 && fstatat(proc, path, &other, 0) == 0 && one.st_dev == other.st_dev
           && one.st_ino == other.st_ino;
}

/* namespaces.pid_namespace() */
static void find_pid_namespace(int pidfd)
{
    int own = openat(proc, "self/ns/pid", O_RDONLY | O_CLOEXEC);

    check(own >= 0, JOIN);
    caller.pids = setns(pidfd, CLONE_NEWPID) == 0 ? PIDS_SEEN : PIDS_FOREIGN;
    if (caller.pids == PIDS_SEEN) {
        caller.pid_namespace = openat(proc, "self/ns/pid_for_children", O_RDONLY | O_CLOEXEC);
        check(caller.pid_namespace >= 0, JOIN);
        if (is_same_file(caller.pid_namespace, "self/ns/pid"))
            close_if_open(&caller.pid_namespace);
        else
            check(setns(own, CLONE_NEWPID) == 0, JOIN);
    }
    close(own);
}

/* namespaces.usable() */
static void check_pid_namespace(bool is_traced)
{
    if (caller.pid_namespace < 0)
        return;
    int owner = ioctl(caller.pid_namespace, NS_GET_USERNS);
    check(owner >= 0 || errno == EPERM, JOIN);
    if (owner < 0)
        caller.pids = PIDS_FOREIGN;
    else if (is_traced)
        caller.pids = PIDS_TRACED;
    if (caller.pids != PIDS_SEEN)
        close_if_open(&caller.pid_namespace);
    close_if_open(&owner);
}

/* namespaces.join_mount_namespace() */
static void join_mount_namespace(int pidfd)
{
    struct stat joined;

    check(setns(pidfd, CLONE_NEWNS) == 0 && fchdir(proc) == 0, JOIN);
    int namespace = openat(proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
    check(namespace >= 0 && fstat(namespace, &joined) == 0, JOIN);
    int owner = ioctl(namespace, NS_GET_USERNS);
    check(owner >= 0, JOIN);
    if (!is_same_file(owner, "self/ns/user"))
        fail_with(EPERM, JOIN);
    caller.mount_namespace = joined.st_ino;
    close(owner);
    close(namespace);
}

static bool keep_capabilities(uint64_t bits)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.effective = (uint32_t)bits, .permitted = (uint32_t)bits},
        {.effective = (uint32_t)(bits >> 32), .permitted = (uint32_t)(bits >> 32)},
    };

    return syscall(SYS_capset, &header, data) == 0;
}

/* A program that root executes gets back what the bounding set holds; the mounter may have less. */
static bool drop_other_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];

    return syscall(SYS_capget, &header, data) == 0 && keep_capabilities(data[0].permitted & CAPABILITIES);
}

/* The capabilities to mount for the caller. Root of a container may look into its users' directories. */
static uint64_t capabilities(void)
{
    return BIT(CAP_SYS_ADMIN) | (caller.uid == 0 ? BIT(CAP_DAC_READ_SEARCH) : 0);
}

/* Takes the identity of the caller to look at files. */
static void become_caller(void)
{
    static gid_t groups[NGROUPS_MAX];
    socklen_t size = sizeof groups;

    check(getsockopt(opened.connection, SOL_SOCKET, SO_PEERGROUPS, groups, &size) == 0, JOIN);
    check(setgroups(size / sizeof *groups, groups) == 0 || errno == EPERM, JOIN);
    setfsgid(caller.gid);
    setfsuid(caller.uid);
    if ((gid_t)setfsgid(caller.gid) != caller.gid || (uid_t)setfsuid(caller.uid) != caller.uid)
        fail_with(EPERM, JOIN);
    check(keep_capabilities(capabilities() | (caller.locks_flags ? BIT(CAP_SYS_CHROOT) : 0)), JOIN);
}

/* daemon._join() and Caller.join(), to mount or to unmount; returns whether Python has to find out more. */
static bool join(bool mounts)
{
    char text[8192];
    struct ucred peer;
    socklen_t size_of_peer = sizeof peer;
    int pidfd;
    socklen_t size_of_pidfd = sizeof pidfd;

    check(getsockopt(opened.connection, SOL_SOCKET, SO_PEERCRED, &peer, &size_of_peer) == 0, JOIN);
    if (peer.pid == front || peer.pid == supervisor)
        fail_with(EPERM, JOIN);
    check(getsockopt(opened.connection, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size_of_pidfd) == 0, JOIN);
    read_file("%ld/status", peer.pid, text, sizeof text);
    bool is_cut = strlen(text) == sizeof text - 1; /* by the caller's many groups, perhaps within a number */
    bool is_traced = (number_after("\nCapBnd:\t", text, 16) & BIT(CAP_SYS_PTRACE)) != 0;
    caller.may_mount = (number_after("\nCapEff:\t", text, 16) & BIT(CAP_SYS_ADMIN)) != 0;
    if (mounts)
        find_pid_namespace(pidfd);
    bool in_user_namespace = setns(pidfd, CLONE_NEWUSER) == 0;
    check(in_user_namespace || errno == EINVAL, JOIN);
    check_pid_namespace(is_traced);
    caller.locks_flags = mounts && opened.cell >= 0 && !in_user_namespace;
    if (mounts) {
        caller.device = openat(devices, "dev/fuse", O_RDWR | O_CLOEXEC);
        check(caller.device >= 0, JOIN);
    }
    check(getsockopt(opened.connection, SOL_SOCKET, SO_PEERCRED, &peer, &size_of_peer) == 0, JOIN);
    caller.uid = peer.uid;
    caller.gid = peer.gid;
    join_mount_namespace(pidfd);
    become_caller();
    close(pidfd);
    return is_cut || (mounts && opened.cell == NO_CELL && !in_user_namespace);
}
