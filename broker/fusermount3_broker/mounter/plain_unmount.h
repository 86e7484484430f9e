/*
 * plain_unmount.h - a plain unmount, as unmounting.unmount() does it: a FUSE filesystem is mounted on the entry, and the
 * front need not know whether it is dead.
 */
static const char UNMOUNT[] = "unmount";

/* What is to be unmounted, and the mount that it is attached to, by their unique IDs. `owner`: see mount_tree.Fuse. */
struct target {
    uint64_t below, id, owner;
    unsigned device;
};

static int open_entry(const char *name)
{
    return openat(opened.pinned, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
}

/* invariants.is_name() */
static bool is_name(const char *name)
{
    return *name != '\0' && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strchr(name, '/') == NULL
           && strlen(name) <= NAME_MAX;
}

static bool is_fuse(struct status *status)
{
    const char *type = text_of(status, status->type);

    return strcmp(type, "fuse") == 0 || strncmp(type, "fuse.", strlen("fuse.")) == 0;
}

/* unmounting._unmount_facts() and unmounting._owner_of() */
static void find_target(const char *name, struct target *target)
{
    struct status status;
    struct statx looked;
    const char *owner;

    target->below = mount_id_of(opened.pinned);
    if (!is_name(name) || !status_of(target->below, STATMOUNT_FS_TYPE, &status) || may_be_fuse(&status))
        leave_to_python(); /* to look the name up would ask a FUSE program */
    int entry = open_entry(name);
    bool is_there = look(entry, &looked);
    target->id = mount_id_of(entry);
    close_if_open(&entry); /* it would keep the mount busy */
    if (!is_there || target->id == target->below
        || !status_of(target->id, STATMOUNT_FS_TYPE | STATMOUNT_MNT_OPTS, &status) || !is_fuse(&status)
        || (owner = option(&status, "user_id=")) == NULL)
        leave_to_python();
    target->owner = strtoull(owner, NULL, 10);
    target->device = looked.stx_dev_minor;
}

/* Tells the front the facts, and returns its plan. */
static void agree_to_unmount(const struct target *target, const char *wanted[UNMOUNT_PLANS])
{
    static const char *const names[] = {UNMOUNT_PLAN_FIELDS}, *const fact_names[] = {UNMOUNT_FACT_FIELDS};
    static struct record heard;
    const uint64_t facts[UNMOUNT_FACTS] = {
        [UNMOUNT_FACT_UID] = caller.uid,
        [UNMOUNT_FACT_MOUNT_NAMESPACE] = caller.mount_namespace,
        [UNMOUNT_FACT_MOUNTED] = true,
        [UNMOUNT_FACT_DEVICE] = target->device,
        [UNMOUNT_FACT_MAY_MOUNT] = caller.may_mount,
    };

    say_facts("UnmountFacts", fact_names, facts, UNMOUNT_FACTS);
    hear(&heard);
    if (!parse(&heard, "UnmountPlan", names, UNMOUNT_PLANS, UNMOUNT_PLAN_FLAGS, wanted))
        hang_up();
    if (caller.uid != 0 && caller.uid != target->owner) /* invariants.allow_unmount() */
        fail_with(EPERM, CHECK_PLAN);
    if (parent_of(target->id) == 0 && errno == ENOENT) /* it is gone, and so is its owner */
        fail_with(EPERM, CHECK_PLAN);
    if (strlen(wanted[UNMOUNT_PLAN_REQUEST_ID]) > LONGEST_STRING)
        fail_with(EINVAL, CHECK_PLAN);
}

/* mount_tree._unmount_once(), under the locks; `last` is a reference to the mount to be closed without them. */
static bool unmount_entry(const char *name, const struct target *target, bool is_lazy, int *last)
{
    *last = open_entry(name);
    if (*last < 0)
        return false;
    if (mount_id_of(*last) != target->id) {
        errno = EBUSY; /* another mount has come, or lies on it */
        return false;
    }
    if (is_lazy)
        return unmount_lazily(*last);
    int copy = (int)syscall(SYS_open_tree, *last, "", OPEN_TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
    if (copy < 0 && errno != EINVAL) /* it is unbindable */
        return false;
    close(*last); /* it would keep the mount busy */
    *last = copy;
    if (fchdir(opened.pinned) != 0)
        return false;
    int error = syscall(SYS_umount2, name, UMOUNT_NOFOLLOW) == 0 ? 0 : errno;
    if (fchdir(proc) != 0) /* the working directory would keep the other one busy */
        return false;
    errno = error;
    return error == 0;
}

/* mount_tree.unmount() */
static void unmount_if_idle(const char *name, const struct target *target, bool is_lazy)
{
    const struct timespec pause = {.tv_nsec = 10 * MILLISECOND};
    uint64_t moment = seconds * UINT64_C(500) < BUSY_MOMENT ? seconds * UINT64_C(500) : BUSY_MOMENT;
    uint64_t give_up = milliseconds() + moment;
    bool is_done = false;

    while (!is_done) {
        int last = NONE;

        check(lock_both(target->below, target->id), UNMOUNT);
        is_done = unmount_entry(name, target, is_lazy, &last);
        int error = errno;
        unlock(target->id);
        unlock(target->below);
        close_if_open(&last);
        if (!is_done && (error != EBUSY || milliseconds() > give_up))
            fail_with(error, UNMOUNT);
        if (!is_done)
            nanosleep(&pause, NULL);
    }
}

static _Noreturn void unmount_for_caller(const char *name)
{
    static struct record heard;
    struct record reply;
    struct target target;
    const char *wanted[UNMOUNT_PLANS];

    bound();
    find_target(name, &target);
    unbound();
    agree_to_unmount(&target, wanted);
    take_request();
    bound();
    unmount_if_idle(name, &target, is_set(wanted[UNMOUNT_PLAN_LAZY]));
    let_go();
    if (!say_word("Unmounted") || !hear_if_any(&heard)) { /* the front has died without answering the caller */
        begin_reply(&reply, wanted[UNMOUNT_PLAN_REQUEST_ID]);
        send(opened.connection, reply.bytes, reply.size, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    finish();
}
