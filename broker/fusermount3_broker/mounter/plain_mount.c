/*
 * plain_mount.c - makes a plain mount for a caller, as a child of the mounter, without the interpreter.
 *
 *     plain_mount CONTROL LINE PROC FUSECTL DEVICES DIRECTORY LOCKS CELL SUPERVISOR
 *
 * Nearly all mounts are plain: the caller may mount where it wants to, the kernel can describe single mounts, and the
 * FUSE program gets its descriptor when the mount is there. This program recognizes them and decides nothing. It does
 * as mounting.mount() and the functions that it names; definitions.h is generated from their modules. What it does not
 * recognize it leaves to Python: it says NotPlain, and the front begins again with another child. Until then the
 * request stays in the caller's connection, so the caller sees no difference.
 *
 * The arguments are descriptors, and the supervisor's pid. CONTROL is where the operation comes from, LINE leads to the
 * parent (worker_pool.py); PROC to LOCKS are those of kept_descriptors.py; DIRECTORY holds the programs; CELL is that
 * of locked_flags.py, or negative: see plain_mount.py.
 *
 * The process ends with the operation. Files of the caller's mount namespace it reaches by descriptors only.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/prctl.h>
#include <sys/vfs.h>

#include "definitions.h"

#include "superblock.h"

#include "conversation.h"
#include "mounts.h"

#include "caller.h"
#include "filesystem.h"

static const char FIND_FACTS[] = "access mountpoint", CHECK_PLAN[] = "check the plan", ROLL_BACK[] = "roll back";

/* The arguments that are in no header. */
static int control, line, fusectl;
static unsigned commit_seconds;

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

    if (is_path(opened.pinned))
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
    struct record reply;

    reply.size = 0; /* the rest need not be cleared */
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
