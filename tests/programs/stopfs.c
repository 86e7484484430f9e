/*
 * stopfs [fuse options] [-o stop_at=OP | silent_at=OP | delay_at=OP,delay_ms=N] [-o later] [-o writeback] MOUNTPOINT:
 * a FUSE filesystem that stops answering at a chosen operation.
 *
 *   stop_at     the whole program stops (SIGSTOP) when it has received OP, and answers after SIGCONT
 *   silent_at   OP is received and never answered; everything else is
 *   delay_at    each OP is answered, one after the other, after so many milliseconds
 *   later       none of this before SIGUSR1
 *   writeback   the kernel keeps what is written until it writes it back (FUSE_WRITEBACK_CACHE), page by page
 *
 * OP is init, destroy, lookup, getattr, setattr, read, write, flush or release. In the root directory files may be created,
 * renamed and removed; what is written to them counts but is not kept: they read as zeros. At its end the program prints
 * how many bytes were written.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE

#include <errno.h>
#include <fuse_lowlevel.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FILES = 1024, MAX_NAME = 64, FIRST_FILE = FUSE_ROOT_ID + 1 };

static struct options {
	char *stop_at, *silent_at, *delay_at;
	int delay_ms, later, writeback;
} options;

static const struct fuse_opt OPTIONS[] = {
	{ "stop_at=%s", offsetof(struct options, stop_at), 0 },
	{ "silent_at=%s", offsetof(struct options, silent_at), 0 },
	{ "delay_at=%s", offsetof(struct options, delay_at), 0 },
	{ "delay_ms=%d", offsetof(struct options, delay_ms), 0 },
	{ "later", offsetof(struct options, later), 1 },
	{ "writeback", offsetof(struct options, writeback), 1 },
	FUSE_OPT_END,
};

static struct file {
	char name[MAX_NAME]; /* "" marks a free slot */
	off_t size;
} files[MAX_FILES];

static volatile sig_atomic_t is_later;
static long long written;

static void on_signal(int signal)
{
	(void)signal;
	is_later = 1;
}

static bool is_chosen(const char *chosen, const char *operation)
{
	return (!options.later || is_later) && chosen && strcmp(chosen, operation) == 0;
}

/* Whether the operation is to be answered; returns when it is time to. */
static bool answers(const char *operation)
{
	struct timespec delay = { options.delay_ms / 1000, options.delay_ms % 1000 * 1000000L };

	if (is_chosen(options.stop_at, operation))
		raise(SIGSTOP);
	if (is_chosen(options.delay_at, operation))
		nanosleep(&delay, NULL);
	return !is_chosen(options.silent_at, operation);
}

static struct stat attributes(fuse_ino_t inode)
{
	struct stat st = { .st_ino = inode, .st_nlink = 1, .st_uid = getuid(), .st_gid = getgid() };

	st.st_mode = inode == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0644;
	st.st_size = inode == FUSE_ROOT_ID ? 0 : files[inode - FIRST_FILE].size;
	return st;
}

/* The slot of that name; the name "" finds a free one. -1 if there is none. */
static int find(const char *name)
{
	for (int i = 0; i < MAX_FILES; i++)
		if (strcmp(files[i].name, name) == 0)
			return i;
	return -1;
}

static struct fuse_entry_param entry_of(int file)
{
	fuse_ino_t inode = FIRST_FILE + (fuse_ino_t)file;

	return (struct fuse_entry_param){ .ino = inode, .attr = attributes(inode) };
}

static void op_init(void *userdata, struct fuse_conn_info *connection)
{
	(void)userdata;
	if (options.writeback) {
		connection->want |= FUSE_CAP_WRITEBACK_CACHE;
		connection->max_write = 4096;
	}
	while (!answers("init"))
		pause();
}

static void op_destroy(void *userdata)
{
	(void)userdata;
	while (!answers("destroy"))
		pause();
}

static void op_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	int file = parent == FUSE_ROOT_ID ? find(name) : -1;
	struct fuse_entry_param entry;

	if (!answers("lookup"))
		return;
	if (file < 0) {
		fuse_reply_err(request, ENOENT);
		return;
	}
	entry = entry_of(file);
	fuse_reply_entry(request, &entry);
}

static void reply_attributes(fuse_req_t request, fuse_ino_t inode)
{
	struct stat st = attributes(inode);

	fuse_reply_attr(request, &st, 0.0);
}

static void op_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *fi)
{
	(void)fi;
	if (answers("getattr"))
		reply_attributes(request, inode);
}

static void op_setattr(fuse_req_t request, fuse_ino_t inode, struct stat *attr, int to_set, struct fuse_file_info *fi)
{
	(void)fi;
	if (!answers("setattr"))
		return;
	if (to_set & FUSE_SET_ATTR_SIZE && inode != FUSE_ROOT_ID)
		files[inode - FIRST_FILE].size = attr->st_size;
	reply_attributes(request, inode);
}

static void op_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode, struct fuse_file_info *fi)
{
	int file = find("");
	struct fuse_entry_param entry;

	(void)mode;
	if (parent != FUSE_ROOT_ID || file < 0 || strlen(name) >= MAX_NAME) {
		fuse_reply_err(request, ENOSPC);
		return;
	}
	files[file] = (struct file){ .size = 0 };
	strcpy(files[file].name, name);
	entry = entry_of(file);
	fuse_reply_create(request, &entry, fi);
}

static void op_rename(fuse_req_t request, fuse_ino_t parent, const char *name, fuse_ino_t new_parent, const char *new_name,
		      unsigned int flags)
{
	int file = find(name);

	(void)parent, (void)new_parent;
	if (file < 0 || flags || find(new_name) >= 0 || strlen(new_name) >= MAX_NAME) {
		fuse_reply_err(request, EINVAL);
		return;
	}
	strcpy(files[file].name, new_name);
	fuse_reply_err(request, 0);
}

static void op_unlink(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	int file = find(name);

	(void)parent;
	if (file >= 0)
		files[file].name[0] = '\0';
	fuse_reply_err(request, file < 0 ? ENOENT : 0);
}

static void op_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *fi)
{
	(void)inode;
	fuse_reply_open(request, fi);
}

static void op_read(fuse_req_t request, fuse_ino_t inode, size_t room, off_t offset, struct fuse_file_info *fi)
{
	off_t size = files[inode - FIRST_FILE].size;
	size_t rest = offset < size ? (size_t)(size - offset) : 0;
	size_t length = rest < room ? rest : room;
	char *zeros;

	(void)fi;
	if (!answers("read"))
		return;
	zeros = calloc(1, length + 1);
	fuse_reply_buf(request, zeros, length);
	free(zeros);
}

static void op_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t length, off_t offset,
		     struct fuse_file_info *fi)
{
	(void)data, (void)fi;
	if (!answers("write"))
		return;
	if (offset + (off_t)length > files[inode - FIRST_FILE].size)
		files[inode - FIRST_FILE].size = offset + (off_t)length;
	written += (long long)length;
	fuse_reply_write(request, length);
}

static void op_flush(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *fi)
{
	(void)inode, (void)fi;
	if (answers("flush"))
		fuse_reply_err(request, 0);
}

static void op_release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *fi)
{
	(void)inode, (void)fi;
	if (answers("release"))
		fuse_reply_err(request, 0);
}

static const struct fuse_lowlevel_ops operations = {
	.init = op_init,
	.destroy = op_destroy,
	.lookup = op_lookup,
	.getattr = op_getattr,
	.setattr = op_setattr,
	.create = op_create,
	.rename = op_rename,
	.unlink = op_unlink,
	.open = op_open,
	.read = op_read,
	.write = op_write,
	.flush = op_flush,
	.release = op_release,
};

int main(int argc, char *argv[])
{
	struct fuse_args args = FUSE_ARGS_INIT(argc, argv);
	struct fuse_cmdline_opts command_line;
	struct fuse_session *session;
	int result = -1;

	if (fuse_opt_parse(&args, &options, OPTIONS, NULL) != 0 || fuse_parse_cmdline(&args, &command_line) != 0)
		return 2;
	signal(SIGUSR1, on_signal);
	session = fuse_session_new(&args, &operations, sizeof(operations), NULL);
	if (session && fuse_set_signal_handlers(session) == 0) {
		if (fuse_session_mount(session, command_line.mountpoint) == 0) {
			result = fuse_session_loop(session);
			fuse_session_unmount(session);
		}
		fuse_remove_signal_handlers(session);
	}
	if (session)
		fuse_session_destroy(session);
	printf("%lld\n", written);
	free(command_line.mountpoint);
	fuse_opt_free_args(&args);
	return result < 0 ? 1 : 0;
}
