/*
 * plain_call.c - serves a plain call, as a child of the mounter, without the interpreter.
 *
 *     plain_call CONTROL LINE PROC FUSECTL DEVICES DIRECTORY LOCKS CELL SUPERVISOR
 *
 * Nearly all calls are plain: see plain_mount.h and plain_unmount.h. This program recognizes them and decides nothing.
 * It does as daemon._serve_caller() and the functions that it names; definitions.h is generated from their modules. What
 * it does not recognize it leaves to Python: it says NotPlain, and the front begins again with another child. Until then
 * the request stays in the caller's connection, so the caller sees no difference.
 *
 * The arguments are descriptors, and the supervisor's pid. CONTROL is where the operation comes from, LINE leads to the
 * parent (worker_pool.py); PROC to LOCKS are those of kept_descriptors.py; DIRECTORY holds the programs; CELL is that
 * of locked_flags.py, or negative: see plain_calls.py.
 *
 * The process ends with the operation. Files of the caller's mount namespace it reaches by descriptors only.
 */
#define _GNU_SOURCE
#include <sys/prctl.h>

#include "definitions.h"

#include "superblock.h"

#include "conversation.h"
#include "mounts.h"

#include "caller.h"
#include "filesystem.h"

#include "plain_mount.h"
#include "plain_unmount.h"

/* The arguments that are in no header. */
static int control, line, fusectl;

/* The start record; the name in an unmount's points into it. */
static struct record start;

/* The request ------------------------------------------------------------------------------------------------- */

/* daemon._receive_start(); returns the name of the entry to unmount, or NULL if the operation is a mount. */
static const char *take_operation(void)
{
    static const char *const mount_fields[] = {START_MOUNT_FIELDS}, *const unmount_fields[] = {START_UNMOUNT_FIELDS};
    const char *values[2];
    int descriptors[3] = {NONE, NONE, NONE};
    struct ucred sender = {.pid = 0};
    char room[CMSG_SPACE(sizeof descriptors) + CMSG_SPACE(sizeof sender)] __attribute__((aligned(8)));
    struct iovec vector = {.iov_base = start.bytes, .iov_len = sizeof start.bytes};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    const char *name = NULL;
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
    _Static_assert(SIZE(mount_fields) == SIZE(values) && SIZE(unmount_fields) == SIZE(values), "there is room for them");
    if (descriptors[0] < 0)
        _exit(0);
    if (parse(&start, START_MOUNT, mount_fields, SIZE(mount_fields), START_MOUNT_FLAGS, values))
        commit_seconds = seconds_of(values[1]);
    else if (parse(&start, START_UNMOUNT, unmount_fields, SIZE(unmount_fields), START_UNMOUNT_FLAGS, values))
        name = values[1];
    else
        _exit(0);
    seconds = seconds_of(values[0]);
    front = sender.pid;
    opened.conversation = descriptors[0];
    opened.connection = descriptors[1];
    close(descriptors[2]); /* the front's pidfd of the caller: the kernel gives this process one of its own */
    dup2(opened.conversation, 0); /* daemon._LAST */
    return name;
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

int main(int argc, char *argv[])
{
    int *const numbers[] = {&control,   &line,  &proc,        &fusectl,   &devices,
                            &directory, &locks, &opened.cell, &supervisor};
    long kept[SIZE(numbers) + 3] = {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};

    if (argc != 1 + (int)SIZE(numbers))
        return EINVAL;
    for (size_t i = 0; i < SIZE(numbers); i++)
        kept[i + 3] = *numbers[i] = atoi(argv[i + 1]);
    memset(argv[0], 0, (size_t)(strchr(argv[argc - 1], '\0') - argv[0])); /* nobody in a container is to read them */
    close_all_but(kept, SIZE(kept) - 1); /* the last number is a pid */
    if (prctl(PR_SET_DUMPABLE, 0) != 0 || !drop_other_capabilities())
        return errno;
    const char *name = take_operation();
    tell_parent();

    bound();
    peek_at_request();
    bool is_unknown = join(name == NULL);
    check_request();
    if (is_unknown)
        leave_to_python();
    unbound();
    if (name == NULL)
        mount_for_caller();
    unmount_for_caller(name);
}
