/*
 * hello_ll [fuse options] MOUNTPOINT: a file, hello, that can be read and written; on the low-level API of libfuse.
 *
 * Serves until it is unmounted or gets SIGTERM, which makes it unmount; in the background unless there is -f. Builds
 * against libfuse 3 and, with -DUSE_LIBFUSE2, against libfuse 2.
 */
#ifdef USE_LIBFUSE2
#define FUSE_USE_VERSION 26
#else
#define FUSE_USE_VERSION 31
#endif
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_INODE = 2, MAX_SIZE = 65536 };

static const char NAME[] = "hello";
static char content[MAX_SIZE] = "hello\n";
static size_t size = 6;

static struct stat attributes(fuse_ino_t inode)
{
	struct stat st = { .st_ino = inode, .st_nlink = 1, .st_uid = getuid(), .st_gid = getgid() };

	st.st_mode = inode == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0644;
	st.st_size = inode == FUSE_ROOT_ID ? 0 : (off_t)size;
	return st;
}

static void op_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param entry = { .ino = FILE_INODE, .attr = attributes(FILE_INODE) };

	if (parent == FUSE_ROOT_ID && strcmp(name, NAME) == 0)
		fuse_reply_entry(request, &entry);
	else
		fuse_reply_err(request, ENOENT);
}

static void op_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *fi)
{
	struct stat st = attributes(inode);

	(void)fi;
	fuse_reply_attr(request, &st, 0.0);
}

static void op_setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attr, int to_set, struct fuse_file_info *fi)
{
	if (to_set & FUSE_SET_ATTR_SIZE) {
		if (attr->st_size > MAX_SIZE) {
			fuse_reply_err(request, EFBIG);
			return;
		}
		size = (size_t)attr->st_size;
	}
	op_getattr(request, inode, fi);
}

static void op_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *fi)
{
	(void)inode;
	if (fi->flags & O_TRUNC)
		size = 0;
	fuse_reply_open(request, fi);
}

static void op_readdir(fuse_req_t request, fuse_ino_t inode, size_t room, off_t offset, struct fuse_file_info *fi)
{
	struct stat st = attributes(FILE_INODE);
	char entry[256];
	size_t length = 0;

	(void)inode, (void)fi;
	if (offset == 0)
		length = fuse_add_direntry(request, entry, sizeof(entry), NAME, &st, 1);
	fuse_reply_buf(request, entry, length < room ? length : 0);
}

static void op_read(fuse_req_t request, fuse_ino_t inode, size_t room, off_t offset, struct fuse_file_info *fi)
{
	size_t start = (size_t)offset < size ? (size_t)offset : size;

	(void)inode, (void)fi;
	fuse_reply_buf(request, content + start, room < size - start ? room : size - start);
}

static void op_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t length, off_t offset,
		     struct fuse_file_info *fi)
{
	(void)inode, (void)fi;
	if ((size_t)offset > MAX_SIZE || length > MAX_SIZE - (size_t)offset) {
		fuse_reply_err(request, EFBIG);
		return;
	}
	memcpy(content + offset, data, length);
	if ((size_t)offset + length > size)
		size = (size_t)offset + length;
	fuse_reply_write(request, length);
}

static const struct fuse_lowlevel_ops operations = {
	.lookup = op_lookup,
	.getattr = op_getattr,
	.setattr = op_setattr,
	.readdir = op_readdir,
	.open = op_open,
	.read = op_read,
	.write = op_write,
};

#ifdef USE_LIBFUSE2
static int serve(struct fuse_args *args)
{
	char *mountpoint;
	int multithreaded, foreground, result = 1;
	struct fuse_chan *channel;
	struct fuse_session *session;

	if (fuse_parse_cmdline(args, &mountpoint, &multithreaded, &foreground) != 0)
		return 1;
	channel = fuse_mount(mountpoint, args);
	if (!channel)
		return 1;
	session = fuse_lowlevel_new(args, &operations, sizeof(operations), NULL);
	if (session && fuse_set_signal_handlers(session) == 0) {
		fuse_session_add_chan(session, channel);
		fuse_daemonize(foreground);
		result = multithreaded ? fuse_session_loop_mt(session) : fuse_session_loop(session);
		fuse_remove_signal_handlers(session);
		fuse_session_remove_chan(channel);
		fuse_session_destroy(session);
	}
	fuse_unmount(mountpoint, channel);
	free(mountpoint);
	return result ? 1 : 0;
}
#else
static int serve(struct fuse_args *args)
{
	struct fuse_cmdline_opts options;
	struct fuse_session *session;
	int result = -1;

	if (fuse_parse_cmdline(args, &options) != 0)
		return 1;
	session = fuse_session_new(args, &operations, sizeof(operations), NULL);
	if (session && fuse_set_signal_handlers(session) == 0) {
		if (fuse_session_mount(session, options.mountpoint) == 0) {
			fuse_daemonize(options.foreground);
			result = options.singlethread ? fuse_session_loop(session) :
							fuse_session_loop_mt(session, options.clone_fd);
			fuse_session_unmount(session);
		}
		fuse_remove_signal_handlers(session);
	}
	if (session)
		fuse_session_destroy(session);
	free(options.mountpoint);
	return result < 0 ? 1 : 0; /* above 0 it is the signal that ended the loop */
}
#endif

int main(int argc, char *argv[])
{
	struct fuse_args args = FUSE_ARGS_INIT(argc, argv);
	int status = serve(&args);

	fuse_opt_free_args(&args);
	return status;
}
