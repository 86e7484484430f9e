/*
 * fast_path.c - carries out the plain calls of fusermount3 without the interpreter.
 *
 * Nearly all calls are plain: a FUSE library mounts on an absolute path, or unmounts it, and the broker does so at once
 * and has nothing to tell. This file recognizes these calls and decides nothing. What it does not recognize it leaves
 * to Python, whose functions it names where it does the same; protocol.h is generated from their modules. Two rules
 * make that safe:
 *
 * - Until the request is sent, there is nothing to undo. Python then starts from the beginning, and finds what
 *   fast_path() found, except the working directory, which does not matter to an absolute mountpoint.
 * - Once the request is sent, it is not repeated. The reply is only looked at (MSG_PEEK) and stays in the socket. If it
 *   is not the plain one, if it does not come at once, or if the FUSE program does not take its descriptor, Python gets
 *   the connection and receives the reply itself. So the broker and the caller see the same call in any case.
 *
 * Only after the FUSE program has its descriptor is there no way back; what remains is to commit.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fast_path.h"
#include "protocol.h"

/* With any path, options of this length fit into a message. */
#define MAX_OPTIONS (MAX_MESSAGE - 2 * PATH_MAX)
#define SIZE(array) (sizeof(array) / sizeof *(array))
/* A string constant, which may contain NUL bytes. */
#define CONSTANT(text) ((struct iovec){.iov_base = (char *)(text), .iov_len = sizeof(text) - 1})

struct call {
    const char *mountpoint, *options;
    bool is_unmount, is_lazy;
};

/* A directory entry: the directory, opened O_PATH; the resolved path; its last component. */
struct place {
    int directory;
    char path[PATH_MAX];
    const char *name;
};

/* Room for more than the plain reply, whose id is short. */
struct reply {
    char bytes[512];
    size_t size;
    bool is_whole;
    int descriptors[MAX_DESCRIPTORS];
    size_t count;
};

static struct iovec string(const char *text)
{
    return (struct iovec){.iov_base = (char *)text, .iov_len = strlen(text)};
}

/* cli.main(): under other names, the executable may be another program. */
static bool is_fusermount(const char *program)
{
    static const char *const other_names[] = {OTHER_NAMES};
    const char *name = basename(program);

    for (size_t i = 0; i < SIZE(other_names); i++)
        if (strcmp(name, other_names[i]) == 0)
            return false;
    return true;
}

/* commandline.parse(), of "-o OPTIONS", of "-u", "-q", "-z" and their clusters, of "--" and the mountpoint. */
static bool parse(int argc, char *const argv[], struct call *call)
{
    bool options_ended = false;

    *call = (struct call){.options = ""};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];

        if (options_ended || *word != '-') {
            if (call->mountpoint != NULL)
                return false;
            call->mountpoint = word;
        } else if (strcmp(word, "--") == 0) {
            options_ended = true;
        } else if (strcmp(word, "-o") == 0 && i + 1 < argc) {
            call->options = argv[++i];
        } else if (word[1] != '\0' && word[1 + strspn(word + 1, "uqz")] == '\0') {
            call->is_unmount |= strchr(word, 'u') != NULL;
            call->is_lazy |= strchr(word, 'z') != NULL;
        } else {
            return false;
        }
    }
    return call->mountpoint != NULL && (call->is_unmount || !call->is_lazy) && strlen(call->options) <= MAX_OPTIONS;
}

/* comm.find(), of a number without sign and space. */
static int comm_socket(void)
{
    const char *text = getenv(COMM_VARIABLE);
    int domain;
    socklen_t size = sizeof domain;

    if (text == NULL || *text == '\0' || strlen(text) > 9 || text[strspn(text, "0123456789")] != '\0')
        return -1;
    int fd = atoi(text);
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX ? fd : -1;
}

/* mountpoint.locate(), of an absolute path that ends in a name; makes its directory the working directory. */
static bool locate(const char *path, struct place *place)
{
    size_t length = strlen(path);

    while (length > 0 && path[length - 1] == '/')
        length--;
    const char *slash = memrchr(path, '/', length);
    if (*path != '/' || slash == NULL || length >= sizeof place->path)
        return false;
    const char *name = slash + 1;
    size_t name_length = length - (size_t)(name - path);
    if (name_length > NAME_MAX || strncmp(name, ".", name_length) == 0 || strncmp(name, "..", name_length) == 0)
        return false;

    memcpy(place->path, path, length - name_length);
    place->path[length - name_length] = '\0';
    place->directory = open(place->path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (place->directory < 0 || fchdir(place->directory) != 0 || getcwd(place->path, sizeof place->path) == NULL)
        return false;
    size_t above = strcmp(place->path, "/") == 0 ? 0 : strlen(place->path);
    if (place->path[0] != '/' || above + 1 + name_length >= sizeof place->path)
        return false;
    place->path[above] = '/';
    place->name = memcpy(place->path + above + 1, name, name_length);
    place->path[above + 1 + name_length] = '\0';
    return true;
}

/* mountpoint.pin(), except below /proc, where Python looks more closely. */
static int pin(const struct place *place)
{
    if (strncmp(place->path, "/proc/", strlen("/proc/")) == 0)
        return -1;
    return openat(place->directory, place->name, O_PATH | O_CLOEXEC | (getuid() != 0 ? O_NOFOLLOW : 0));
}

/* Returns the value if the entry of an environment is that of the variable, else NULL. */
static const char *value_of(const char *entry, const char *variable)
{
    size_t length = strlen(variable);

    return strncmp(entry, variable, length) == 0 && entry[length] == '=' ? entry + length + 1 : NULL;
}

/* go-fuse passes no other variable. */
static bool has_only_comm_variable(void)
{
    for (char *const *entry = environ; *entry != NULL; entry++)
        if (strchr(*entry, '=') != NULL && value_of(*entry, COMM_VARIABLE) == NULL)
            return false;
    return getenv(COMM_VARIABLE) != NULL;
}

/* approach._variable_of_parent(); NULL if the environment can't be read. */
static const char *variable_of_parent(void)
{
    char path[32], *entry = NULL;
    const char *value = NULL;
    size_t size = 0;

    snprintf(path, sizeof path, "/proc/%d/environ", (int)getppid());
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NULL;
    while (value == NULL && getdelim(&entry, &size, '\0', file) > 0)
        value = value_of(entry, BROKER_VARIABLE);
    bool is_unknown = ferror(file);
    fclose(file);
    return value != NULL || is_unknown ? value : "";
}

/* approach.socket_path(), except where a file in /etc has it. */
static bool find_broker(struct sockaddr_un *address)
{
    const char *path = has_only_comm_variable() ? variable_of_parent() : getenv(BROKER_VARIABLE) ?: "";

    if (path != NULL && *path == '\0')
        path = access(BROKER_CONFIGURATION, F_OK) == 0 ? NULL : BROKER_DEFAULT_PATH;
    if (path == NULL || strlen(path) >= sizeof address->sun_path)
        return false;
    address->sun_family = AF_UNIX;
    strcpy(address->sun_path, path);
    return true;
}

static int connect_to_broker(void)
{
    struct sockaddr_un address = {0};

    if (!find_broker(&address))
        return -1;
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (connection >= 0 && connect(connection, (struct sockaddr *)&address, sizeof address) != 0) {
        close(connection);
        return -1;
    }
    return connection;
}

static bool send_with_descriptor(int to, struct iovec *parts, size_t count, int descriptor)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct msghdr message = {
        .msg_iov = parts, .msg_iovlen = count, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};

    memcpy(CMSG_DATA(&control.header), &descriptor, sizeof descriptor);
    return sendmsg(to, &message, MSG_NOSIGNAL) >= 0;
}

/* wire.encode_request() */
static bool send_request(int connection, const struct call *call, const struct place *place, int descriptor)
{
    struct iovec mount[] = {CONSTANT(MOUNT_TO_MOUNTPOINT), string(place->path), CONSTANT(MOUNT_TO_OPTIONS),
                            string(call->options), CONSTANT(MOUNT_END)};
    struct iovec unmount[] = {CONSTANT(UNMOUNT_TO_MOUNTPOINT), string(place->path), CONSTANT(UNMOUNT_TO_NAME),
                              string(place->name),
                              call->is_lazy ? CONSTANT(UNMOUNT_LAZY_END) : CONSTANT(UNMOUNT_END)};
    struct iovec *parts = call->is_unmount ? unmount : mount;

    _Static_assert(SIZE(mount) == SIZE(unmount), "both have as many parts");
    /* A broker that hangs up before it reads the request has said why. */
    return send_with_descriptor(connection, parts, SIZE(mount), descriptor) || errno == EPIPE;
}

/* Does all of the call that precedes the reply. Returns the connection; -1 if no request has been sent. */
static int ask(const struct call *call)
{
    struct place place = {.directory = -1};
    int pinned = -1, connection = -1;

    if (locate(call->mountpoint, &place) && (call->is_unmount || (pinned = pin(&place)) >= 0)
        && (connection = connect_to_broker()) >= 0
        && !send_request(connection, call, &place, call->is_unmount ? place.directory : pinned)) {
        close(connection);
        connection = -1;
    }
    if (pinned >= 0)
        close(pinned);
    if (place.directory >= 0)
        close(place.directory);
    return connection;
}

/* Looks at the reply, which stays in the socket, and opens its descriptors. If that fails, the reply is not whole. */
static void peek(int connection, struct reply *reply)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof reply->descriptors)];
    } control;
    struct iovec vector = {.iov_base = reply->bytes, .iov_len = sizeof reply->bytes};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(connection, &message, MSG_PEEK | MSG_CMSG_CLOEXEC);

    reply->is_whole = size >= 0 && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
    reply->count = 0;
    if (size < 0)
        return;
    reply->size = (size_t)size;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
        reply->count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(reply->descriptors, CMSG_DATA(header), reply->count * sizeof(int));
    }
}

/* Returns whether the reply is what wire.encode_reply() makes of success without warnings and watcher. */
static bool is_plain(const struct reply *reply, size_t descriptors)
{
    const struct iovec start = CONSTANT(REPLY_TO_ID), end = CONSTANT(REPLY_END);
    const char *id = reply->bytes + start.iov_len, *after_id = reply->bytes + reply->size - end.iov_len;

    return reply->is_whole && reply->count == descriptors && reply->size >= start.iov_len + end.iov_len
           && memcmp(reply->bytes, start.iov_base, start.iov_len) == 0
           && memcmp(after_id, end.iov_base, end.iov_len) == 0 && memchr(id, '\0', (size_t)(after_id - id)) == NULL;
}

/* Receives what peek() has looked at. Otherwise the broker would see an error in place of the connection's end. */
static void discard_reply(int connection)
{
    char byte;

    recv(connection, &byte, sizeof byte, 0);
}

/* client.commit() */
static _Noreturn void commit(const char *program, int connection)
{
    struct pollfd hang_up = {.fd = connection, .events = POLLIN};
    ssize_t sent = send(connection, COMMIT, sizeof COMMIT - 1, MSG_NOSIGNAL);
    int error = errno;

    discard_reply(connection);
    if (sent < 0) {
        dprintf(STDERR_FILENO, "%s: broker: %s\n", program, strerror(error));
        _exit(1);
    }
    poll(&hang_up, 1, REPLY_TIMEOUT_MS);
    _exit(0);
}

int fast_path(int argc, char *const argv[])
{
    struct call call;
    struct reply reply;
    int comm = -1, connection;

    if (!is_fusermount(argv[0]) || !parse(argc, argv, &call))
        return -1;
    if (!call.is_unmount && (comm = comm_socket()) < 0)
        return -1;
    if ((connection = ask(&call)) < 0)
        return -1;

    struct pollfd readable = {.fd = connection, .events = POLLIN};
    if (poll(&readable, 1, AT_ONCE_MS) != 1)
        return connection;
    peek(connection, &reply);
    if (is_plain(&reply, call.is_unmount ? 0 : 1)) {
        if (call.is_unmount) {
            discard_reply(connection);
            _exit(0);
        }
        if (send_with_descriptor(comm, &CONSTANT("\0"), 1, reply.descriptors[0]))
            commit(argv[0], connection);
    }
    for (size_t i = 0; i < reply.count; i++)
        close(reply.descriptors[i]);
    return connection;
}
