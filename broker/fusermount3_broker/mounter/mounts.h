/*
 * mounts.h - what plain_call asks and changes in the mount tree, as mount_tree.py does where the kernel can describe a
 * single mount. It names the functions of that module. All fail with errno.
 */
#include <fcntl.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#define MILLISECOND 1000000L

/* The beginning of struct statmount (linux/mount.h), and the texts behind it. */
struct status {
    uint32_t size, options;
    uint64_t answered;
    uint32_t major, minor;
    uint64_t magic;
    uint32_t flags, type;
    uint64_t id, parent;
    uint32_t old_id, old_parent;
    uint64_t attributes, propagation, peer_group, master, propagate_from;
    uint32_t root, point;
    char unused[400], text[1 << 16];
};
/* The room for texts that nearly always suffices. */
enum { USUAL_ROOM = 3584 };
_Static_assert(offsetof(struct status, text) == SIZE_OF_STATMOUNT, "as in syscalls.statmount()");

/* struct mnt_id_req */
struct mounts_request {
    uint32_t size, spare;
    uint64_t id, parameter;
};

/* struct mount_attr */
struct attributes {
    uint64_t set, clear, propagation, user_namespace;
};

/* An empty file; see mount_tree.alone(). */
static int locks = NONE;

static bool look(int descriptor, struct statx *looked)
{
    return statx(descriptor, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, looked) == 0;
}

/* syscalls.unique_mount_id(), or 0. */
static uint64_t mount_id_of(int descriptor)
{
    struct file_handle no_room = {.handle_bytes = 0};
    uint64_t id = 0;
    int flags = AT_EMPTY_PATH | AT_HANDLE_FID | AT_HANDLE_MNT_ID_UNIQUE;

    return syscall(SYS_name_to_handle_at, descriptor, "", &no_room, &id, flags) == 0 || errno == EOVERFLOW ? id : 0;
}

/*
 * mount_tree._status_of(); fails with ENOENT for a mount that is not in this mount namespace, and with EOVERFLOW if
 * there is more text than room for it.
 */
static bool status_of(uint64_t id, uint64_t mask, struct status *status)
{
    struct mounts_request request = {.size = sizeof request, .id = id, .parameter = mask};

    if (syscall(SYS_STATMOUNT, &request, status, offsetof(struct status, text) + USUAL_ROOM, 0) != 0
        && (errno != EOVERFLOW || syscall(SYS_STATMOUNT, &request, status, sizeof *status, 0) != 0))
        return false;
    errno = EINVAL;
    return (status->answered & mask) == mask;
}

static char *text_of(struct status *status, uint32_t offset)
{
    status->text[sizeof status->text - 1] = '\0';
    return status->text + (offset < sizeof status->text ? offset : sizeof status->text - 1);
}

/* Whether a FUSE program may serve the filesystem, which may be fuseblk, too. */
static bool may_be_fuse(struct status *status)
{
    return strncmp(text_of(status, status->type), "fuse", strlen("fuse")) == 0;
}

/* Returns what follows `name` in a mount's options, which begins an option; NULL if none does. */
static const char *option(struct status *status, const char *name)
{
    const char *each = text_of(status, status->options);

    while (each != NULL && strncmp(each, name, strlen(name)) != 0) {
        each = strchr(each, ',');
        if (each != NULL)
            each++;
    }
    return each != NULL ? each + strlen(name) : NULL;
}

/* mount_tree._parent_of(), or 0. */
static uint64_t parent_of(uint64_t id)
{
    struct status status;

    return status_of(id, STATMOUNT_MNT_BASIC, &status) ? status.parent : 0;
}

/* Whether there may be mounts on this mount or below. */
static bool may_have_mounts(uint64_t id)
{
    struct mounts_request request = {.size = sizeof request, .id = id};
    uint64_t found;

    return syscall(SYS_LISTMOUNT, &request, &found, 1, 0) != 0;
}

/* mount_tree._is_covered(), or whether that can't be said. A mount that can't be reached from the root has no point. */
static bool is_covered(uint64_t id)
{
    struct mounts_request request = {.size = sizeof request, .id = id};
    const uint64_t mask = STATMOUNT_MNT_BASIC | STATMOUNT_MNT_POINT;
    static struct status here, other;
    uint64_t found[64];
    long count;

    if (!status_of(id, mask, &here))
        return errno == EOVERFLOW;
    if (*text_of(&here, here.point) == '\0')
        return false;
    while ((count = syscall(SYS_LISTMOUNT, &request, found, SIZE(found), 0)) > 0) {
        for (long i = 0; i < count; i++)
            if (status_of(found[i], mask, &other) && other.parent == id
                && strcmp(text_of(&other, other.point), text_of(&here, here.point)) == 0)
                return true;
        request.parameter = found[count - 1];
    }
    return count < 0 && errno != ENOENT;
}

static bool set_attributes(int mount, uint64_t set, uint64_t clear)
{
    struct attributes attributes = {.set = set, .clear = clear};

    return syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attributes, sizeof attributes) == 0;
}

static bool is_locked(uint64_t id, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)id, .l_len = 1};

    return fcntl(locks, F_SETLK, &lock) == 0;
}

static void unlock(uint64_t id)
{
    int error = errno;

    is_locked(id, F_UNLCK);
    errno = error;
}

static uint64_t milliseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)(now.tv_nsec / MILLISECOND);
}

/* mount_tree.alone(): excludes the mounter's other children from changing this mount and those on it. */
static bool lock(uint64_t id)
{
    const struct timespec pause = {.tv_nsec = MILLISECOND};
    uint64_t give_up = 0;

    while (!is_locked(id, F_WRLCK)) {
        if (errno != EAGAIN && errno != EACCES)
            return false;
        if (give_up == 0)
            give_up = milliseconds() + seconds * UINT64_C(1000);
        if (milliseconds() > give_up) {
            errno = ETIMEDOUT;
            return false;
        }
        nanosleep(&pause, NULL);
    }
    return true;
}

static bool lock_both(uint64_t below, uint64_t id)
{
    if (!lock(below))
        return false;
    if (lock(id))
        return true;
    unlock(below);
    return false;
}

/* By descriptor. */
static bool unmount_lazily(int mount)
{
    char path[32];

    snprintf(path, sizeof path, "self/fd/%d", mount);
    return syscall(SYS_umount2, path, MNT_DETACH) == 0;
}

/* mount_tree.attach(); then nothing is attached if it fails. */
static bool attach_to(int mountpoint, uint64_t below, int mount, uint64_t id)
{
    const int flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    bool is_done = false;

    if (!lock(below))
        return false;
    if (parent_of(below) == 0) {
        errno = EINVAL; /* the mountpoint is not in the caller's mount namespace */
    } else if (syscall(SYS_move_mount, mount, "", mountpoint, "", flags) == 0) {
        is_done = parent_of(id) == below;
        if (!is_done) {
            unmount_lazily(mount);
            errno = EBUSY; /* the mountpoint is covered */
        }
    }
    unlock(below);
    return is_done;
}

/* mount_tree.detach(), which waits for half of the time of a step. */
static bool detach_from(uint64_t below, int mount, uint64_t id)
{
    const struct timespec pause = {.tv_nsec = 50 * MILLISECOND};
    bool is_done = false;

    for (unsigned tries = 0; tries < 10 * seconds && !is_done; tries++) {
        if (tries > 0)
            nanosleep(&pause, NULL);
        if (!lock_both(below, id))
            return false;
        bool is_gone = parent_of(id) == 0 && errno == ENOENT;
        is_done = is_gone || (!is_covered(id) && unmount_lazily(mount));
        unlock(id);
        unlock(below);
    }
    errno = EBUSY; /* another mount lies on it */
    return is_done;
}
