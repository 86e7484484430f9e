/*
 * conversation.h - the conversation of plain_call with the front, in records of text fields (messages/records.py), and
 * how it ends. The functions do as those of front_connection.py and mounter/daemon.py that they name.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SIZE(array) (sizeof(array) / sizeof *(array))

enum { NONE = -1 };

struct record {
    char bytes[MAX_MESSAGE];
    size_t size;
};

/* What is open for the operation. */
static struct {
    int conversation, connection;
    /* The mountpoint; the mount until it is attached; the cell and its copy, which hold that mount, too. */
    int pinned, made, cell, copy_of_cell;
} opened = {NONE, NONE, NONE, NONE, NONE, NONE};

/* The time of a step. */
static unsigned seconds;

/* Whether the request still waits in the connection, with its descriptor. */
static bool has_request = true;

/* What this process says -------------------------------------------------------------------------------------- */

static void put(struct record *record, const char *name, const char *value)
{
    size_t room = sizeof record->bytes - record->size;
    int size = snprintf(record->bytes + record->size, room, "%s=%s", name, value);

    if (size < 0 || (size_t)size >= room)
        _exit(0);
    record->size += (size_t)size + 1;
}

static void put_number(struct record *record, const char *name, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof text, "%" PRIu64, value);
    put(record, name, text);
}

static void begin(struct record *record, const char *kind)
{
    record->size = 0;
    put(record, "kind", kind);
}

/* Conversation.say(); false if the front has hung up. */
static bool say(const struct record *record)
{
    return send(opened.conversation, record->bytes, record->size, MSG_NOSIGNAL) >= 0;
}

static void say_facts(const char *kind, const char *const names[], const uint64_t facts[], size_t count)
{
    struct record record;

    begin(&record, kind);
    for (size_t i = 0; i < count; i++)
        put_number(&record, names[i], facts[i]);
    say(&record);
}

static bool say_word(const char *kind)
{
    struct record record;

    begin(&record, kind);
    return say(&record);
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

/* wire.encode_reply(), without warnings. */
static void begin_reply(struct record *record, const char *request)
{
    record->size = 0;
    put(record, "protocol", REPLY_PROTOCOL);
    put(record, "id", request);
    put(record, "errno", "0");
}

/* What it hears ----------------------------------------------------------------------------------------------- */

/* Returns the value of the field at `*at`, and moves on; NULL if it has another name. */
static const char *next_value(const char **at, const char *end, const char *name)
{
    const char *nul = memchr(*at, '\0', (size_t)(end - *at)), *value = *at + strlen(name) + 1;

    if (nul == NULL || strncmp(*at, name, strlen(name)) != 0 || value[-1] != '=')
        return NULL;
    *at = nul + 1;
    return value;
}

static bool is_set(const char *value)
{
    return strcmp(value, "1") == 0;
}

/*
 * Points `values` to the fields of a record, which must be of this kind and have exactly these names in this order.
 * Those of `flags`, a set of places, must be "0" or "1", as in records._value().
 */
static bool parse(const struct record *record, const char *kind, const char *const names[], size_t count,
                  uint64_t flags, const char *values[])
{
    const char *at = record->bytes, *end = at + record->size, *found = next_value(&at, end, "kind");

    if (found == NULL || strcmp(found, kind) != 0)
        return false;
    for (size_t i = 0; i < count; i++) {
        if ((values[i] = next_value(&at, end, names[i])) == NULL)
            return false;
        if ((flags >> i & 1) != 0 && !is_set(values[i]) && strcmp(values[i], "0") != 0)
            return false;
    }
    return at == end;
}

static bool is_word(const struct record *record, const char *kind)
{
    return parse(record, kind, NULL, 0, 0, NULL);
}

/* Returns a number of seconds; ends the process if there is another text. */
static unsigned seconds_of(const char *text)
{
    if (*text == '\0' || strlen(text) > 7 || text[strspn(text, "0123456789")] != '\0' || atoi(text) > MOST_SECONDS)
        _exit(0);
    return (unsigned)atoi(text);
}

/* How the operation ends -------------------------------------------------------------------------------------- */

/* Conversation.bounded(): a step that takes too long ends the process. */
static void bound(void)
{
    alarm(seconds);
}

static void unbound(void)
{
    alarm(0);
}

static void close_if_open(int *descriptor)
{
    if (*descriptor >= 0)
        close(*descriptor);
    *descriptor = NONE;
}

/* Whether the descriptor was opened with O_PATH: then closing it asks no FUSE program. */
static bool is_path(int descriptor)
{
    return (fcntl(descriptor, F_GETFL) & O_PATH) != 0;
}

/* Receives the request, without its descriptor. */
static void take_request(void)
{
    char byte;

    if (has_request)
        recv(opened.connection, &byte, sizeof byte, MSG_DONTWAIT);
    has_request = false;
}

/*
 * mounting._closed_on_failure() and Caller.let_go(): what is not attached ends here. A mountpoint that was opened without
 * O_PATH stays open until the process ends.
 */
static void let_go(void)
{
    bound();
    close_if_open(&opened.made);
    close_if_open(&opened.copy_of_cell);
    close_if_open(&opened.cell);
    if (is_path(opened.pinned))
        close_if_open(&opened.pinned);
    unbound();
}

/* Conversation.wait_for_end() */
static void wait_for_front(void)
{
    char byte;

    while (recv(opened.conversation, &byte, sizeof byte, 0) > 0)
        ;
}

/* daemon._drain() */
static void drain(void)
{
    const int yes = 1;
    char byte;
    struct iovec vector = {.iov_base = &byte, .iov_len = sizeof byte};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};

    bound();
    setsockopt(opened.connection, SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes);
    for (int i = 0; i < MOST_QUEUED; i++) {
        ssize_t size = recvmsg(opened.connection, &message, MSG_DONTWAIT);
        if (size < 0 || (size == 0 && (message.msg_flags & MSG_CTRUNC) == 0))
            return;
    }
}

/* daemon._conversation(), after the last record. */
static _Noreturn void finish(void)
{
    unbound();
    wait_for_front();
    drain();
    _exit(0);
}

static _Noreturn void hang_up(void)
{
    take_request();
    let_go();
    finish();
}

/* Leaves the request in the connection, for another child. */
static _Noreturn void leave_to_python(void)
{
    let_go();
    say_word("NotPlain");
    wait_for_front();
    _exit(0);
}

static _Noreturn void fail_with(int error, const char *step)
{
    struct record record;

    take_request();
    let_go();
    begin(&record, "Failed");
    put_number(&record, "errno", (uint64_t)error);
    put(&record, "step", step);
    say(&record);
    finish();
}

/* Ends the operation unless `is_done`; errno says why. */
static void check(bool is_done, const char *step)
{
    if (!is_done)
        fail_with(errno, step);
}

/* Conversation.hear(); false if the front has hung up. */
static bool hear_if_any(struct record *record)
{
    ssize_t size = recv(opened.conversation, record->bytes, sizeof record->bytes, MSG_TRUNC);

    if (size <= 0 || (size_t)size > sizeof record->bytes)
        return false;
    record->size = (size_t)size;
    if (is_word(record, "LetGo")) {
        take_request();
        let_go();
        say_word("HasLetGo");
        finish();
    }
    return true;
}

static void hear(struct record *record)
{
    if (!hear_if_any(record))
        hang_up();
}
