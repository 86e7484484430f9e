/*
 * filesystem.h - the filesystem that the front has planned, as a mount that is attached nowhere yet. The functions do
 * as those of filesystem.py and locked_flags.py that they name. All end the operation if they fail.
 */
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static const char MOUNT[] = "mount", LOCK_FLAGS[] = LOCK_STEP;

/* The fields of the plan, as the front has sent them. */
static const char *plan[PLANS];

/* A directory where nothing is secret, for a process in the caller's pid namespace. */
static int directory;

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
