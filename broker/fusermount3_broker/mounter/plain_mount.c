/*
 * plain_mount.c - makes a plain mount for a caller, as a child of the mounter, without the interpreter.
 *
 *     plain_mount CONTROL LINE PROC FUSECTL DEVICES DIRECTORY LOCKS CELL SUPERVISOR
 *
 * Nearly all mounts are plain: the caller may mount where it wants to, the kernel can describe single mounts, and the
 * FUSE program gets its descriptor when the mount is there. This program recognizes them and decides nothing. It does as
 * mounting.mount() and the functions that it names; definitions.h is generated from their modules. What it does not
 * recognize it leaves to Python: it says NotPlain, and the front begins again with another child. Until then the request
 * stays in the caller's connection, so the caller sees no difference.
 *
 * The arguments are descriptors, and the supervisor's pid. CONTROL is where the operation comes from, LINE leads to the
 * parent (worker_pool.py); PROC to LOCKS are those of kept_descriptors.py; DIRECTORY is an empty one; CELL is that of
 * locked_flags.py, or negative: see plain_mount.py.
 *
 * The process ends with the operation. Files of the caller's mount namespace it reaches by descriptors only.
 */
#define _GNU_SOURCE
#include <grp.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include "definitions.h"

#include "conversation.h"
#include "mounts.h"
#include "superblock.h"

#define BIT(number) (UINT64_C(1) << (number))

/* The steps that can fail, in the front's messages. */
static const char JOIN[] = "join", FIND_FACTS[] = "access mountpoint", CHECK_PLAN[] = "check the plan";
static const char MOUNT[] = "mount", LOCK_FLAGS[] = LOCK_STEP, ROLL_BACK[] = "roll back";

static int control, line, proc, fusectl, devices, directory, supervisor;
static unsigned commit_seconds;
static pid_t front;

static struct {
    uid_t uid;
    gid_t gid;
    int device, pid_namespace;
    unsigned pids;
    ino_t mount_namespace;
    bool locks_flags;
} caller = {.device = NONE, .pid_namespace = NONE};

/* The fields of the front's plan. */
static const char *plan[PLANS];

/* The request ------------------------------------------------------------------------------------------------- */

/* daemon._receive_start() and worker_pool.tell_parent() */
static void take_operation(void)
{
    static struct record start;
    static const char *const names[] = {START_FIELDS};
    const char *values[SIZE(names)];
    int descriptors[3] = {NONE, NONE, NONE};
    struct ucred sender = {.pid = 0};
    char room[CMSG_SPACE(sizeof descriptors) + CMSG_SPACE(sizeof sender)] __attribute__((aligned(8)));
    struct iovec vector = {.iov_base = start.bytes, .iov_len = sizeof start.bytes};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t size = recvmsg(control, &message, MSG_CMSG_CLOEXEC);

    if (size <= 0 || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
        _exit(0);
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each != NULL; each = CMSG_NXTHDR(&message, each)) {
        if (each->cmsg_type == SCM_CREDENTIALS)
            memcpy(&sender, CMSG_DATA(each), sizeof sender);
        else if (each->cmsg_type == SCM_RIGHTS && each->cmsg_len == CMSG_LEN(sizeof descriptors))
            memcpy(descriptors, CMSG_DATA(each), sizeof descriptors);
    }
    start.size = (size_t)size;
    if (descriptors[0] < 0 || !parse(&start, START_KIND, names, SIZE(names), values))
        _exit(0);
    seconds = number_of(values[0]);
    commit_seconds = number_of(values[1]);
    front = sender.pid;
    opened.conversation = descriptors[0];
    opened.connection = descriptors[1];
    close(descriptors[2]); /* the front's pidfd of the caller: the kernel gives this process one of its own */
    dup2(opened.conversation, 0); /* daemon._LAST */
}

static bool send_descriptor(int to, const char *bytes, size_t size, int descriptor)
{
    char room[CMSG_SPACE(sizeof descriptor)] __attribute__((aligned(8))) = {0};
    struct iovec vector = {.iov_base = (char *)bytes, .iov_len = size};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = room, .msg_controllen = CMSG_LEN(sizeof descriptor)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    return sendmsg(to, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

/* worker_pool.tell_parent() */
static void tell_parent(void)
{
    prctl(PR_SET_NAME, BUSY_NAME);
    send_descriptor(line, "", 1, opened.conversation);
    close(line);
    close(control);
}

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

/*
 * Caller._take_request(), but the request stays in the connection. Another number of descriptors than one is not
 * received: to close one may take as long as a FUSE program likes (fuse_connections.descriptors_in_flight()).
 */
static void peek_at_request(void)
{
    char text[512], byte, room[CMSG_SPACE(sizeof opened.pinned)] __attribute__((aligned(8)));
    struct iovec vector = {.iov_base = &byte, .iov_len = sizeof byte};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = room, .msg_controllen = CMSG_LEN(sizeof opened.pinned)};

    read_file("self/fdinfo/%ld", opened.connection, text, sizeof text);
    if (number_after("scm_fds: ", text, 10) != 1)
        leave_to_python();
    check(recvmsg(opened.connection, &message, MSG_PEEK | MSG_CMSG_CLOEXEC | MSG_DONTWAIT) >= 0, JOIN);
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header == NULL || header->cmsg_type != SCM_RIGHTS)
        leave_to_python();
    memcpy(&opened.pinned, CMSG_DATA(header), sizeof opened.pinned);
}

/* Caller.check_request() of a descriptor opened without O_PATH. The end of the process closes it, and may block. */
static void check_request(void)
{
    struct record record;
    struct statx looked;
    char name[16];

    if ((fcntl(opened.pinned, F_GETFL) & O_PATH) != 0)
        return;
    check(look(opened.pinned, &looked), JOIN);
    snprintf(name, sizeof name, "%u", looked.stx_dev_minor);
    if (looked.stx_dev_major == 0 && faccessat(fusectl, name, F_OK, 0) == 0) {
        begin(&record, "Entering");
        put(&record, "device", name);
        put_number(&record, "uid", caller.uid);
        put_number(&record, "mount-namespace", caller.mount_namespace);
        say(&record);
    }
    take_request();
    begin(&record, "BadDescriptors");
    put_number(&record, "descriptors", 1);
    say(&record);
    finish();
}

/* The caller -------------------------------------------------------------------------------------------------- */

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

/* daemon._join() and Caller.join(); returns whether Python has to find out more. */
static bool join(void)
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
    bool is_cut = *text != '\0' && strstr(text, "\nCapBnd:\t") == NULL; /* by the caller's many groups */
    bool is_traced = (number_after("\nCapBnd:\t", text, 16) & BIT(CAP_SYS_PTRACE)) != 0;
    find_pid_namespace(pidfd);
    bool in_user_namespace = setns(pidfd, CLONE_NEWUSER) == 0;
    check(in_user_namespace || errno == EINVAL, JOIN);
    check_pid_namespace(is_traced);
    caller.locks_flags = opened.cell >= 0 && !in_user_namespace;
    caller.device = openat(devices, "dev/fuse", O_RDWR | O_CLOEXEC);
    check(caller.device >= 0, JOIN);
    check(getsockopt(opened.connection, SOL_SOCKET, SO_PEERCRED, &peer, &size_of_peer) == 0, JOIN);
    caller.uid = peer.uid;
    caller.gid = peer.gid;
    join_mount_namespace(pidfd);
    become_caller();
    close(pidfd);
    return is_cut || (opened.cell == NO_CELL && !in_user_namespace);
}

/* The plan ---------------------------------------------------------------------------------------------------- */

static bool may_access(int mode)
{
    return syscall(SYS_faccessat2, opened.pinned, "", mode, AT_EMPTY_PATH | AT_EACCESS) == 0;
}

/* mounting._mount_facts(), of a place where any caller may mount; invariants.allow_mount() need not be asked then. */
static void find_facts(uint64_t facts[FACTS])
{
    static const uint64_t kernel_filesystems[] = {KERNEL_FILESYSTEMS};
    struct statfs filesystem;
    struct statx looked;
    struct status status;
    struct stat pinned;

    uint64_t below = mount_id_of(opened.pinned);
    if (!status_of(below, STATMOUNT_FS_TYPE, &status))
        fail_with(EINVAL, MOUNT);
    if (strncmp(text_of(&status, status.type), "fuse", strlen("fuse")) == 0)
        leave_to_python(); /* what follows would ask the FUSE program */
    check(look(opened.pinned, &looked) && fstat(opened.pinned, &pinned) == 0, FIND_FACTS);
    check(fstatfs(opened.pinned, &filesystem) == 0, FIND_FACTS);
    facts[FACT_UID] = caller.uid;
    facts[FACT_GID] = caller.gid;
    facts[FACT_ROOT_MODE] = pinned.st_mode & S_IFMT;
    facts[FACT_FOREIGN_STICKY] = facts[FACT_SEARCH_ERRNO] = facts[FACT_ACCESS_ERRNO] = 0;
    facts[FACT_FILESYSTEM] = (uint64_t)filesystem.f_type;
    facts[FACT_MOUNT_NAMESPACE] = caller.mount_namespace;

    bool is_plain = S_ISDIR(pinned.st_mode) || S_ISREG(pinned.st_mode);
    if (caller.uid != 0)
        is_plain &= (pinned.st_mode & S_ISVTX) == 0 && may_access(W_OK) && (S_ISREG(pinned.st_mode) || may_access(X_OK));
    for (size_t i = 0; i < SIZE(kernel_filesystems); i++)
        is_plain &= facts[FACT_FILESYSTEM] != kernel_filesystems[i];
    if ((looked.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0)
        is_plain &= !may_have_mounts(below); /* that would be hidden */
    if (!is_plain)
        leave_to_python();
}

/* mounting.is_decided_on() */
static bool is_decided_on(const struct record *record, const uint64_t facts[FACTS])
{
    static const char *const names[] = {PLAN_FIELDS};
    char number[24];

    _Static_assert(SIZE(names) == PLANS, "each field has a name");
    if (!parse(record, "MountPlan", names, PLANS, plan))
        return false;
    for (size_t i = 0; i < DECIDED_FACTS; i++) {
        snprintf(number, sizeof number, "%" PRIu64, facts[i]);
        if (strcmp(plan[i], number) != 0)
            return false;
    }
    return true;
}

/* mounting._agreed() */
static void agree(const uint64_t facts[FACTS])
{
    static const char *const names[] = {FACT_FIELDS};
    static struct record heard;
    struct record said;

    hear(&heard);
    if (!is_decided_on(&heard, facts)) {
        begin(&said, "MountFacts");
        for (size_t i = 0; i < FACTS; i++)
            put_number(&said, names[i], facts[i]);
        say(&said);
        hear(&heard);
        if (!is_decided_on(&heard, facts))
            fail_with(EPERM, CHECK_PLAN);
    }
    const char *const texts[] = {plan[PLAN_SOURCE], plan[PLAN_SUBTYPE], plan[PLAN_MAX_READ], plan[PLAN_BLOCK_SIZE],
                                 plan[PLAN_REQUEST_ID]};
    for (size_t i = 0; i < SIZE(texts); i++)
        if (strlen(texts[i]) > LONGEST_STRING)
            leave_to_python();
    if (is_set(plan[PLAN_SYNC_INIT]) || *plan[PLAN_WARNINGS] != '\0')
        leave_to_python();
}

/* The mount --------------------------------------------------------------------------------------------------- */

static void set_parameter(int context, const char *name, const char *value)
{
    check(syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, name, value, 0) == 0, MOUNT);
}

static void set_flag(int context, const char *name, const char *wished)
{
    check(!is_set(wished) || syscall(SYS_fsconfig, context, FSCONFIG_SET_FLAG, name, NULL, 0) == 0, MOUNT);
}

/* filesystem.configure() */
static int configure(void)
{
    int context = (int)syscall(SYS_fsopen, "fuse", FSOPEN_CLOEXEC);
    char device[16], root_mode[16];

    check(context >= 0, MOUNT);
    snprintf(device, sizeof device, "%d", caller.device);
    snprintf(root_mode, sizeof root_mode, "%o", (unsigned)atoi(plan[PLAN_ROOT_MODE]));
    if (*plan[PLAN_SUBTYPE] != '\0')
        set_parameter(context, "subtype", plan[PLAN_SUBTYPE]);
    set_parameter(context, "source", plan[PLAN_SOURCE]);
    set_parameter(context, "fd", device);
    set_parameter(context, "rootmode", root_mode);
    set_parameter(context, "user_id", plan[PLAN_UID]);
    set_parameter(context, "group_id", plan[PLAN_GID]);
    if (*plan[PLAN_MAX_READ] != '\0')
        set_parameter(context, "max_read", plan[PLAN_MAX_READ]);
    if (*plan[PLAN_BLOCK_SIZE] != '\0')
        set_parameter(context, "blksize", plan[PLAN_BLOCK_SIZE]);
    set_flag(context, "ro", plan[PLAN_READ_ONLY]);
    set_flag(context, "sync", plan[PLAN_SYNC]);
    set_flag(context, "dirsync", plan[PLAN_DIRSYNC]);
    set_flag(context, "lazytime", plan[PLAN_LAZYTIME]);
    set_flag(context, "allow_other", plan[PLAN_ALLOW_OTHER]);
    set_flag(context, "default_permissions", plan[PLAN_DEFAULT_PERMISSIONS]);
    return context;
}

/* filesystem._attributes() */
static uint64_t attributes(void)
{
    uint64_t given = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;

    given |= is_set(plan[PLAN_READ_ONLY]) ? MOUNT_ATTR_RDONLY : 0;
    given |= is_set(plan[PLAN_NOEXEC]) ? MOUNT_ATTR_NOEXEC : 0;
    given |= is_set(plan[PLAN_NODIRATIME]) ? MOUNT_ATTR_NODIRATIME : 0;
    given |= is_set(plan[PLAN_NOSYMFOLLOW]) ? MOUNT_ATTR_NOSYMFOLLOW : 0;
    given |= is_set(plan[PLAN_STRICTATIME]) ? MOUNT_ATTR_STRICTATIME : 0;
    given |= is_set(plan[PLAN_NOATIME]) && !is_set(plan[PLAN_STRICTATIME]) ? MOUNT_ATTR_NOATIME : 0;
    return given;
}

/* child_processes.wait() and waiting_for_grandchildren(); returns 0 or an errno. */
static int wait_for(pid_t child)
{
    struct pollfd ended = {.fd = (int)syscall(SYS_pidfd_open, child, 0), .events = POLLIN};
    unsigned left = alarm(0);
    bool is_late = ended.fd < 0 || poll(&ended, 1, left == 0 ? -1 : (int)left * 1000) != 1;
    int status;

    if (is_late)
        kill(child, SIGKILL);
    check(waitpid(child, &status, 0) == child, MOUNT);
    alarm(left);
    while (wait(NULL) > 0) /* the child's child */
        ;
    close_if_open(&ended.fd);
    if (is_late)
        return ETIMEDOUT;
    return WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
}

/* filesystem.create() and superblock_creator.create(), which executes a program because the mounter is not as small. */
static void create_filesystem(void)
{
    static const long commands[] = {CMD_CREATE_EXCL, CMD_CREATE, 0};
    bool is_hidden = caller.pids == PIDS_TRACED;
    long error;

    check(!is_hidden || unshare(CLONE_NEWPID) == 0, MOUNT);
    int context = configure();
    if (caller.pid_namespace < 0 && !is_hidden) {
        error = create(context, commands);
    } else {
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        pid_t child = fork();
        check(child >= 0, MOUNT);
        if (child == 0)
            create_superblock(directory, caller.pid_namespace, caller.device, context, commands);
        error = wait_for(child);
    }
    if (error != 0)
        fail_with((int)error, MOUNT);
    opened.made = (int)syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes());
    check(opened.made >= 0, MOUNT);
    close(context);
}

/* locked_flags.check_locked() */
static void check_locked(uint64_t attribute)
{
    check(set_attributes(opened.made, attribute, 0), LOCK_FLAGS);
    if (set_attributes(opened.made, 0, attribute) || errno != EPERM)
        fail_with(EPERM, LOCK_FLAGS);
}

/* Cell.lock() */
static void lock_flags(void)
{
    const char *name = S_ISDIR((mode_t)atoi(plan[PLAN_ROOT_MODE])) ? CELL_DIRECTORY : CELL_FILE;
    int here = openat(proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);

    check(here >= 0 && set_attributes(opened.made, 0, NOT_LOCKED) && setns(opened.cell, CLONE_NEWNS) == 0, LOCK_FLAGS);
    check(syscall(SYS_move_mount, opened.made, "", AT_FDCWD, name, MOVE_MOUNT_F_EMPTY_PATH) == 0, LOCK_FLAGS);
    check(unshare(CLONE_NEWNS) == 0, LOCK_FLAGS);
    close_if_open(&opened.made);
    opened.copy_of_cell = openat(proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
    opened.made = (int)syscall(SYS_open_tree, AT_FDCWD, name, OPEN_TREE_CLONE | O_CLOEXEC);
    check(opened.copy_of_cell >= 0 && opened.made >= 0, LOCK_FLAGS);
    check(setns(here, CLONE_NEWNS) == 0 && fchdir(proc) == 0, LOCK_FLAGS);
    close(here);
    check_locked(MOUNT_ATTR_NOSUID);
    check_locked(MOUNT_ATTR_NODEV);
    check(keep_capabilities(capabilities()), LOCK_FLAGS);
}

/* mounting._create() */
static void make_mount(void)
{
    bound();
    create_filesystem();
    unbound();
    bound();
    if (caller.locks_flags)
        lock_flags();
    uint64_t restricted = attributes() & NOT_LOCKED; /* filesystem.restrict() */
    check(restricted == 0 || set_attributes(opened.made, restricted, 0), LOCK_FLAGS);
    unbound();
}

/* mounting.agree_to_attach() */
static void agree_to_attach(uint64_t id)
{
    static struct record heard;
    struct record said;
    struct statx looked;

    check(look(opened.made, &looked), MOUNT);
    begin(&said, "Made");
    put_number(&said, "device", looked.stx_dev_minor);
    put_number(&said, "mount-namespace", caller.mount_namespace);
    put_number(&said, "pids", caller.pids);
    put_number(&said, "mount-id", id);
    say(&said);
    hear(&heard);
    if (!is_word(&heard, "Attach"))
        hang_up();
}

/* mounting._is_as_planned(), by mount_tree.fuse_of() */
static bool is_as_planned(uint64_t id)
{
    struct status status;
    char owner[32], group[32], *rest;
    unsigned owners = 0, groups = 0, others = 0;

    if (!status_of(id, STATMOUNT_MNT_OPTS, &status))
        return false;
    snprintf(owner, sizeof owner, "user_id=%s", plan[PLAN_UID]);
    snprintf(group, sizeof group, "group_id=%s", plan[PLAN_GID]);
    for (char *each = strtok_r(text_of(&status, status.options), ",", &rest); each != NULL;
         each = strtok_r(NULL, ",", &rest)) {
        owners += strcmp(each, owner) == 0;
        groups += strcmp(each, group) == 0;
        others += strcmp(each, "allow_other") == 0;
    }
    return owners == 1 && groups == 1 && others == is_set(plan[PLAN_ALLOW_OTHER]);
}

/* mounting._detach() */
static void detach(uint64_t below, uint64_t id)
{
    bound();
    check(detach_from(below, opened.made, id), ROLL_BACK);
    unbound();
}

/* mounting._attach(), without an alarm: from now on, the end of this process would leave the mount there. */
static void attach(uint64_t below, uint64_t id)
{
    check(attach_to(opened.pinned, below, opened.made, id), MOUNT);
    if (caller.pid_namespace >= 0 && !is_as_planned(id)) {
        detach(below, id);
        fail_with(EPERM, CHECK_PLAN);
    }
}

/* The end ----------------------------------------------------------------------------------------------------- */

/* Caller.hand_over() and wire.encode_reply() */
static bool hand_over(void)
{
    struct record reply = {.size = 0};

    put(&reply, "protocol", REPLY_PROTOCOL);
    put(&reply, "id", plan[PLAN_REQUEST_ID]);
    put(&reply, "errno", "0");
    if (is_set(plan[PLAN_AUTO_UNMOUNT]))
        put(&reply, "auto-unmount", "1");
    return send_descriptor(opened.connection, reply.bytes, reply.size, caller.device);
}

/* Caller.commits() */
static bool caller_commits(void)
{
    static struct record said;
    struct pollfd readable = {.fd = opened.connection, .events = POLLIN};
    struct iovec vector = {.iov_base = said.bytes, .iov_len = sizeof said.bytes};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};

    if (poll(&readable, 1, (int)commit_seconds * 1000) != 1)
        return false;
    ssize_t size = recvmsg(opened.connection, &message, MSG_PEEK | MSG_DONTWAIT);
    if (size <= 0 || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || said.bytes[size - 1] != '\0')
        return false;
    for (const char *field = said.bytes; field < said.bytes + size; field += strlen(field) + 1)
        if (strcmp(field, COMMIT) == 0)
            return true;
    return false;
}

/* mounting._is_wanted(): the front decides, or the caller if the front has died. */
static bool is_wanted(void)
{
    static struct record heard;
    ssize_t size = recv(opened.conversation, heard.bytes, sizeof heard.bytes, 0);

    heard.size = size > 0 ? (size_t)size : 0;
    return size > 0 ? is_word(&heard, "Keep") : caller_commits();
}

/* mounting._settle() */
static _Noreturn void settle(uint64_t below, uint64_t id)
{
    bool is_kept = hand_over();

    close_if_open(&caller.device); /* at once: any open copy keeps a dead FUSE program's mount from failing */
    if (is_kept) {
        say_word("Mounted");
        close_if_open(&opened.copy_of_cell); /* while the caller hands the device on */
        close_if_open(&opened.cell);
        is_kept = is_wanted();
    }
    if (!is_kept)
        detach(below, id);
    let_go();
    say_word(is_kept ? "Kept" : "RolledBack");
    finish();
}

int main(int argc, char *argv[])
{
    int *const numbers[] = {&control,   &line,  &proc,        &fusectl,   &devices,
                            &directory, &locks, &opened.cell, &supervisor};
    long kept[SIZE(numbers) + 3] = {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};
    uint64_t facts[FACTS];

    if (argc != 1 + (int)SIZE(numbers))
        return EINVAL;
    for (size_t i = 0; i < SIZE(numbers); i++)
        kept[i + 3] = *numbers[i] = atoi(argv[i + 1]);
    memset(argv[0], 0, (size_t)(strchr(argv[argc - 1], '\0') - argv[0])); /* nobody in a container is to read them */
    close_all_but(kept, SIZE(kept) - 1); /* the last number is a pid */
    if (prctl(PR_SET_DUMPABLE, 0) != 0 || !drop_other_capabilities())
        return errno;
    take_operation();
    tell_parent();

    bound();
    peek_at_request();
    bool is_unknown = join();
    check_request();
    if (is_unknown)
        leave_to_python();
    unbound();
    bound();
    find_facts(facts);
    unbound();
    agree(facts);
    take_request();
    make_mount();
    uint64_t below = mount_id_of(opened.pinned), id = mount_id_of(opened.made);
    agree_to_attach(id);
    attach(below, id);
    settle(below, id);
}
