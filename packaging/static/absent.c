/*
 * absent.c - stubs for functions that libpython's modules refer to and fusermount3-proxy never calls.
 *
 * Because they are defined here, the linker does not take them from libc.a, where they depend on name service, the
 * resolver and dlopen: code that a static program cannot use safely, and that opens files of the image it runs in.
 */
#include <errno.h>
#include <grp.h>
#include <netdb.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>

/* The time module calls it on import, for the zone's name; libc's version would open /etc/localtime. */
struct tm *localtime_r(const time_t *seconds, struct tm *result)
{
    (void)seconds;
    *result = (struct tm){.tm_mday = 1, .tm_year = 70, .tm_wday = 4, .tm_zone = "UTC"};
    return result;
}

/* Used by import.c, from dynload_shlib.c, which needs dlopen: extension modules' suffixes, and a loader. */
const char *_PyImport_DynLoadFiletab[] = {NULL};

void (*_PyImport_FindSharedFuncptr(const char *prefix, const char *name, const char *path, FILE *file))(void)
{
    (void)prefix, (void)name, (void)path, (void)file;
    return NULL;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **result)
{
    (void)node, (void)service, (void)hints, (void)result;
    return EAI_FAIL;
}

void freeaddrinfo(struct addrinfo *result)
{
    (void)result;
}

int getnameinfo(const struct sockaddr *address, socklen_t size, char *host, socklen_t host_size,
                char *service, socklen_t service_size, int flags)
{
    (void)address, (void)size, (void)host, (void)host_size, (void)service, (void)service_size, (void)flags;
    return EAI_FAIL;
}

int gethostbyname_r(const char *name, struct hostent *entry, char *buffer, size_t size,
                    struct hostent **result, int *error)
{
    (void)name, (void)entry, (void)buffer, (void)size, (void)error;
    *result = NULL;
    return ENOSYS;
}

int gethostbyaddr_r(const void *address, socklen_t length, int family, struct hostent *entry, char *buffer,
                    size_t size, struct hostent **result, int *error)
{
    (void)address, (void)length, (void)family, (void)entry, (void)buffer, (void)size, (void)error;
    *result = NULL;
    return ENOSYS;
}

struct servent *getservbyname(const char *name, const char *protocol)
{
    (void)name, (void)protocol;
    return NULL;
}

struct servent *getservbyport(int port, const char *protocol)
{
    (void)port, (void)protocol;
    return NULL;
}

struct protoent *getprotobyname(const char *name)
{
    (void)name;
    return NULL;
}

int getgrouplist(const char *user, gid_t group, gid_t *groups, int *count)
{
    (void)user;
    if (*count < 1)
        return -1;
    *groups = group;
    return *count = 1;
}

int initgroups(const char *user, gid_t group)
{
    (void)user, (void)group;
    errno = ENOSYS;
    return -1;
}
