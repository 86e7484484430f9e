/*
 * plain_mount.h - a plain mount, as mounting.mount() makes it: the caller may mount where it wants to, the kernel can
 * describe single mounts, and the FUSE program gets its descriptor when the mount is there.
 */
#include <poll.h>
#include <sys/vfs.h>

static const char FIND_FACTS[] = "access mountpoint", CHECK_PLAN[] = "check the plan", ROLL_BACK[] = "roll back";

static unsigned commit_seconds;

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
    if (may_be_fuse(&status))
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
        is_plain &= (pinned.st_mode & S_ISVTX) == 0 && may_access(W_OK)
                    && (S_ISREG(pinned.st_mode) || may_access(X_OK));
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
    if (!parse(record, "MountPlan", names, PLANS, PLAN_FLAGS, plan))
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

    hear(&heard);
    if (!is_decided_on(&heard, facts)) {
        say_facts("MountFacts", names, facts, FACTS);
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

/* Caller.hand_over() */
static bool hand_over(void)
{
    struct record reply;

    begin_reply(&reply, plan[PLAN_REQUEST_ID]);
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

static _Noreturn void mount_for_caller(void)
{
    uint64_t facts[FACTS];

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
