/*
 * oldclient: a stand-in for the two clients of meta-fuse-csi-plugin, which speak the protocol of its driver:
 *
 *   fusermount3 -o OPTIONS [--] MOUNTPOINT                         in the place of fusermount3, for libfuse
 *   fuse-starter --fd-passing-socket-path PATH -- PROGRAM ARG...   starts a program that takes /dev/fd/3
 *
 * Both connect to a stream socket, say nothing, and get one message: JSON with the volume's name, and with it the
 * descriptor. Then they remove the path of the socket. The first finds the path in FUSERMOUNT3PROXY_FDPASSING_SOCKPATH;
 * it does not mount, and has nothing to unmount, so with -u it does nothing.
 */
#define _GNU_SOURCE

#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

union control {
	char buffer[CMSG_SPACE(sizeof(int))];
	struct cmsghdr aligned;
};

static int receive_descriptor(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char text[4096];
	union control control;
	struct iovec iov = { .iov_base = text, .iov_len = sizeof(text) - 1 };
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buffer, .msg_controllen = sizeof(control.buffer)
	};
	struct cmsghdr *header;
	int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), descriptor;
	ssize_t length;

	if (strlen(path) >= sizeof(address.sun_path))
		errx(1, "%s: too long", path);
	strcpy(address.sun_path, path);
	if (connect(connection, (struct sockaddr *)&address, sizeof(address)) != 0)
		err(1, "failed to connect to %s", path);
	length = recvmsg(connection, &message, 0);
	if (length <= 0)
		errx(1, "nothing came from %s", path);
	text[length] = '\0';
	header = CMSG_FIRSTHDR(&message);
	if (!header || header->cmsg_type != SCM_RIGHTS || text[0] != '{' || !strstr(text, "\"volumeName\""))
		errx(1, "not what the driver says: %s", text);
	memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
	close(connection);
	unlink(path);
	return descriptor;
}

static void send_descriptor(int socket, int descriptor)
{
	union control control = { .buffer = "" };
	struct iovec iov = { .iov_base = "", .iov_len = 1 };
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buffer, .msg_controllen = sizeof(control.buffer)
	};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	*header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
	if (sendmsg(socket, &message, 0) < 0)
		err(1, "sendmsg");
}

static int fusermount(int argc, char *argv[])
{
	const char *path = getenv("FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"), *commfd = getenv("_FUSE_COMMFD");

	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], "-u") == 0)
			return 0;
	if (!path || !commfd)
		errx(1, "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH and _FUSE_COMMFD have to be set");
	send_descriptor(atoi(commfd), receive_descriptor(path));
	return 0;
}

static int start(int argc, char *argv[])
{
	int descriptor, status;
	pid_t child;

	if (argc < 5 || strcmp(argv[1], "--fd-passing-socket-path") != 0 || strcmp(argv[3], "--") != 0)
		errx(2, "usage: fuse-starter --fd-passing-socket-path PATH -- PROGRAM ARG...");
	descriptor = receive_descriptor(argv[2]);
	child = fork();
	if (child == 0) {
		if (descriptor != 3 && (dup2(descriptor, 3) < 0 || close(descriptor) != 0))
			err(1, "dup2");
		execvp(argv[4], argv + 4);
		err(127, "%s", argv[4]);
	}
	close(descriptor);
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char *argv[])
{
	const char *name = strrchr(argv[0], '/');

	return strcmp(name ? name + 1 : argv[0], "fuse-starter") == 0 ? start(argc, argv) : fusermount(argc, argv);
}
