/*
 * whoamifs: a small, real FUSE filesystem that tells its reader who the reader is.
 *
 *   /whoami       read-only; its content is "uid=U gid=G pid=P\n" of the process that opened it, as FUSE reported it to the daemon
 *   /files/       files kept in memory: create, write, read, truncate, rename, remove
 *
 * All files belong to the uid and gid the daemon runs as. The same source builds against libfuse 3 and, with -DUSE_LIBFUSE2,
 * against libfuse 2; linked statically it is the only program that a FROM scratch image needs, hence the two extra commands:
 *
 *   whoamifs [fuse options] MOUNTPOINT      serve, as any FUSE program does
 *   whoamifs --pause                        do nothing until SIGTERM or SIGINT: the first process of a container without sleep
 *   whoamifs --probe MOUNTPOINT [-o OPTS]   mount, use the mount as a reader would, unmount with the fusermount of this libfuse;
 *                                           one fact a line, "name=value ...", on stdout; exit status 0 if and only if all was well
 */
#ifdef USE_LIBFUSE2
#define FUSE_USE_VERSION 26
#define FUSERMOUNT "fusermount"
#else
#define FUSE_USE_VERSION 31
#define FUSERMOUNT "fusermount3"
#endif
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- the store: a fixed number of files of a fixed size, behind one lock ---- */

enum { MAX_FILES = 64, MAX_NAME = 255, MAX_SIZE = 256 * 1024 };

struct file {
	char name[MAX_NAME + 1]; /* "" marks a free slot */
	mode_t mode;
	size_t size;
	struct timespec mtime;
	char data[MAX_SIZE];
};

static struct file files[MAX_FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char WHOAMI[] = "/whoami";
static const char FILES[] = "/files";

/* The name below /files, or NULL if the path is something else. */
static const char *name_in_files(const char *path)
{
	size_t prefix = sizeof(FILES) - 1;

	return strncmp(path, FILES, prefix) == 0 && path[prefix] == '/' ? path + prefix + 1 : NULL;
}

/* The slot with this name; "" finds a free one. NULL if there is none. */
static struct file *find(const char *name)
{
	for (int i = 0; i < MAX_FILES; i++)
		if (strcmp(files[i].name, name) == 0)
			return &files[i];
	return NULL;
}

static struct file *find_path(const char *path)
{
	const char *name = name_in_files(path);

	return name && *name ? find(name) : NULL;
}

static void touch(struct file *file)
{
	clock_gettime(CLOCK_REALTIME, &file->mtime);
}

static void resize(struct file *file, size_t size)
{
	if (size > file->size)
		memset(file->data + file->size, 0, size - file->size);
	file->size = size;
	touch(file);
}

/* ---- the operations; the libfuse 2 signatures lack the trailing arguments ---- */

static int fill_attr(const char *path, struct stat *st)
{
	const struct file *file;

	memset(st, 0, sizeof(*st));
	st->st_uid = getuid();
	st->st_gid = getgid();
	st->st_nlink = 1;
	if (strcmp(path, "/") == 0 || strcmp(path, FILES) == 0) {
		st->st_mode = S_IFDIR | 0755;
		st->st_nlink = 2;
		return 0;
	}
	if (strcmp(path, WHOAMI) == 0) {
		st->st_mode = S_IFREG | 0444;
		return 0;
	}
	file = find_path(path);
	if (!file)
		return -ENOENT;
	st->st_mode = S_IFREG | file->mode;
	st->st_size = (off_t)file->size;
	st->st_mtim = file->mtime;
	return 0;
}

static int op_getattr_locked(const char *path, struct stat *st)
{
	pthread_mutex_lock(&lock);
	int result = fill_attr(path, st);
	pthread_mutex_unlock(&lock);
	return result;
}

static int op_open(const char *path, struct fuse_file_info *fi)
{
	const struct fuse_context *reader = fuse_get_context();
	struct stat st;
	char *text;

	if (strcmp(path, WHOAMI) != 0)
		return op_getattr_locked(path, &st);
	if ((fi->flags & O_ACCMODE) != O_RDONLY)
		return -EACCES;
	if (asprintf(&text, "uid=%d gid=%d pid=%d\n", (int)reader->uid, (int)reader->gid, (int)reader->pid) < 0)
		return -ENOMEM;
	fi->fh = (uintptr_t)text;
	fi->direct_io = 1; /* each open has its own content: nothing for the page cache, and st_size does not count */
	return 0;
}

static int op_release(const char *path, struct fuse_file_info *fi)
{
	(void)path;
	free((void *)(uintptr_t)fi->fh); /* NULL for the files in memory */
	return 0;
}

static int op_create(const char *path, mode_t mode, struct fuse_file_info *fi)
{
	const char *name = name_in_files(path);
	struct file *file;
	int result = 0;

	(void)fi;
	if (!name)
		return -EACCES;
	if (strlen(name) > MAX_NAME)
		return -ENAMETOOLONG;
	pthread_mutex_lock(&lock);
	file = find("");
	if (file) {
		strcpy(file->name, name);
		file->mode = mode & 07777;
		file->size = 0;
		touch(file);
	} else {
		result = -ENOSPC;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

static int read_bytes(const char *content, size_t length, char *buf, size_t size, off_t offset)
{
	if ((size_t)offset >= length)
		return 0;
	if (size > length - (size_t)offset)
		size = length - (size_t)offset;
	memcpy(buf, content + offset, size);
	return (int)size;
}

static int op_read(const char *path, char *buf, size_t size, off_t offset, struct fuse_file_info *fi)
{
	const char *whoami = (const char *)(uintptr_t)fi->fh;
	const struct file *file;
	int result = -ENOENT;

	if (whoami)
		return read_bytes(whoami, strlen(whoami), buf, size, offset);
	pthread_mutex_lock(&lock);
	file = find_path(path);
	if (file)
		result = read_bytes(file->data, file->size, buf, size, offset);
	pthread_mutex_unlock(&lock);
	return result;
}

static int op_write(const char *path, const char *buf, size_t size, off_t offset, struct fuse_file_info *fi)
{
	struct file *file;
	int result = (int)size;

	(void)fi;
	if ((size_t)offset > MAX_SIZE || size > MAX_SIZE - (size_t)offset)
		return -EFBIG;
	pthread_mutex_lock(&lock);
	file = find_path(path);
	if (file) {
		if ((size_t)offset + size > file->size)
			resize(file, (size_t)offset + size);
		memcpy(file->data + offset, buf, size);
		touch(file);
	} else {
		result = -ENOENT;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

static int truncate_path(const char *path, off_t size)
{
	struct file *file;
	int result = 0;

	if (size > MAX_SIZE)
		return -EFBIG;
	pthread_mutex_lock(&lock);
	file = find_path(path);
	if (file)
		resize(file, (size_t)size);
	else
		result = strcmp(path, WHOAMI) == 0 ? -EACCES : -ENOENT;
	pthread_mutex_unlock(&lock);
	return result;
}

static int chmod_path(const char *path, mode_t mode)
{
	struct file *file;

	pthread_mutex_lock(&lock);
	file = find_path(path);
	if (file)
		file->mode = mode & 07777;
	pthread_mutex_unlock(&lock);
	return file ? 0 : -EPERM;
}

static int utimens_path(const char *path, const struct timespec times[2])
{
	struct file *file;

	pthread_mutex_lock(&lock);
	file = find_path(path);
	if (file && times[1].tv_nsec == UTIME_NOW)
		touch(file);
	else if (file && times[1].tv_nsec != UTIME_OMIT)
		file->mtime = times[1];
	pthread_mutex_unlock(&lock);
	return file ? 0 : -EPERM;
}

static int op_unlink(const char *path)
{
	struct file *file;

	pthread_mutex_lock(&lock);
	file = find_path(path);
	if (file)
		file->name[0] = '\0';
	pthread_mutex_unlock(&lock);
	return file ? 0 : -EPERM;
}

static int rename_path(const char *from, const char *to)
{
	const char *name = name_in_files(to);
	struct file *file, *replaced;

	if (!name)
		return -EACCES;
	if (strlen(name) > MAX_NAME)
		return -ENAMETOOLONG;
	pthread_mutex_lock(&lock);
	file = find_path(from);
	replaced = find(name);
	if (file && replaced && replaced != file)
		replaced->name[0] = '\0';
	if (file && replaced != file)
		strcpy(file->name, name);
	pthread_mutex_unlock(&lock);
	return file ? 0 : -EACCES;
}

static int op_statfs(const char *path, struct statvfs *st)
{
	(void)path;
	memset(st, 0, sizeof(*st));
	st->f_bsize = st->f_frsize = 4096;
	st->f_blocks = MAX_FILES * (MAX_SIZE / 4096);
	st->f_files = MAX_FILES;
	st->f_namemax = MAX_NAME;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_FILES; i++)
		st->f_ffree += files[i].name[0] == '\0';
	pthread_mutex_unlock(&lock);
	st->f_bfree = st->f_bavail = st->f_ffree * (MAX_SIZE / 4096);
	return 0;
}

#ifdef USE_LIBFUSE2
#define FILL(name) fill(buf, name, NULL, 0)
#else
#define FILL(name) fill(buf, name, NULL, 0, 0)
#endif

static int list(const char *path, void *buf, fuse_fill_dir_t fill)
{
	int is_root = strcmp(path, "/") == 0;

	if (!is_root && strcmp(path, FILES) != 0)
		return -ENOTDIR;
	FILL(".");
	FILL("..");
	if (is_root) {
		FILL(WHOAMI + 1);
		FILL(FILES + 1);
		return 0;
	}
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_FILES; i++)
		if (files[i].name[0])
			FILL(files[i].name);
	pthread_mutex_unlock(&lock);
	return 0;
}

#ifdef USE_LIBFUSE2
static int op_getattr(const char *path, struct stat *st)
{
	return op_getattr_locked(path, st);
}
static int op_truncate(const char *path, off_t size)
{
	return truncate_path(path, size);
}
static int op_chmod(const char *path, mode_t mode)
{
	return chmod_path(path, mode);
}
static int op_utimens(const char *path, const struct timespec times[2])
{
	return utimens_path(path, times);
}
static int op_rename(const char *from, const char *to)
{
	return rename_path(from, to);
}
static int op_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *fi)
{
	(void)offset, (void)fi;
	return list(path, buf, fill);
}
#else
static int op_getattr(const char *path, struct stat *st, struct fuse_file_info *fi)
{
	(void)fi;
	return op_getattr_locked(path, st);
}
static int op_truncate(const char *path, off_t size, struct fuse_file_info *fi)
{
	(void)fi;
	return truncate_path(path, size);
}
static int op_chmod(const char *path, mode_t mode, struct fuse_file_info *fi)
{
	(void)fi;
	return chmod_path(path, mode);
}
static int op_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *fi)
{
	(void)fi;
	return utimens_path(path, times);
}
static int op_rename(const char *from, const char *to, unsigned int flags)
{
	return flags ? -EINVAL : rename_path(from, to);
}
static int op_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *fi,
		      enum fuse_readdir_flags flags)
{
	(void)offset, (void)fi, (void)flags;
	return list(path, buf, fill);
}
#endif

static const struct fuse_operations operations = {
	.getattr = op_getattr,
	.readdir = op_readdir,
	.open = op_open,
	.create = op_create,
	.read = op_read,
	.write = op_write,
	.release = op_release,
	.truncate = op_truncate,
	.chmod = op_chmod,
	.utimens = op_utimens,
	.unlink = op_unlink,
	.rename = op_rename,
	.statfs = op_statfs,
};

/* ---- --pause ---- */

static void ignore_signal(int signal)
{
	(void)signal;
}

/* As the first process of a container this inherits its orphans, and reaps them. */
static int pause_until_told(void)
{
	sigset_t stop;
	int signal = 0;

	sigemptyset(&stop);
	sigaddset(&stop, SIGTERM);
	sigaddset(&stop, SIGINT);
	sigaddset(&stop, SIGCHLD);
	sigprocmask(SIG_BLOCK, &stop, NULL);
	sigaction(SIGCHLD, &(struct sigaction){ .sa_handler = ignore_signal }, NULL);
	while (signal != SIGTERM && signal != SIGINT) {
		sigwait(&stop, &signal);
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
	return 0;
}

/* ---- --probe ---- */

static const int DEADLINE_MS = 20000;
static int problems;

/* One line on stdout, at once: what is known when the probe hangs is known to the test as well. */
static void __attribute__((format(printf, 1, 2))) fact(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	fflush(stdout);
}

/* Counts a problem unless `good`, and says which. errno is that of the failed call, or 0 if no call failed. */
static int expect(int good, const char *what)
{
	if (!good) {
		fact(errno ? "problem=%s: %s" : "problem=%s", what, strerror(errno));
		problems++;
	}
	errno = 0;
	return good;
}

static void sleep_ms(long ms)
{
	nanosleep(&(struct timespec){ .tv_nsec = ms * 1000000 }, NULL);
}

/* How many lines of /proc/self/mountinfo have this mountpoint; the last one is copied to `line`. */
static int count_mounts(const char *mountpoint, char *line, size_t size)
{
	char buf[8192], where[PATH_MAX];
	FILE *mountinfo = fopen("/proc/self/mountinfo", "re");
	int count = 0;

	if (!expect(mountinfo != NULL, "open /proc/self/mountinfo"))
		return 0;
	while (fgets(buf, sizeof(buf), mountinfo)) {
		if (sscanf(buf, "%*s %*s %*s %*s %4095s", where) == 1 && strcmp(where, mountpoint) == 0) {
			snprintf(line, size, "%.*s", (int)strcspn(buf, "\n"), buf);
			count++;
		}
	}
	fclose(mountinfo);
	return count;
}

static pid_t start_server(char *program, char *mountpoint, char *options)
{
	char *argv[] = { program, "-f", mountpoint, options ? "-o" : NULL, options, NULL };
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (pid == 0)
		exit(fuse_main(options ? 5 : 3, argv, &operations, NULL));
	return pid;
}

/* Waits for a process, at most DEADLINE_MS; its exit status, -1 after the deadline, 128+N after signal N. */
static int wait_for(pid_t pid)
{
	int status;

	for (int waited = 0; waited < DEADLINE_MS; waited += 2) {
		if (waitpid(pid, &status, WNOHANG) == pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		sleep_ms(2);
	}
	return -1;
}

static int wait_until_mounted(const char *mountpoint, pid_t server, int mounts_before)
{
	siginfo_t ended = { .si_pid = 0 };
	char line[8192];

	for (int waited = 0; waited < DEADLINE_MS; waited += 2) {
		if (count_mounts(mountpoint, line, sizeof(line)) > mounts_before) {
			fact("mountinfo=%s", line);
			return 1;
		}
		if (waitid(P_PID, (id_t)server, &ended, WEXITED | WNOHANG | WNOWAIT) < 0 || ended.si_pid == server)
			return 0;
		sleep_ms(2);
	}
	errno = ETIMEDOUT;
	return 0;
}

static void probe_whoami(void)
{
	char self[128], seen[128] = "";
	int fd = open("whoami", O_RDONLY | O_CLOEXEC);

	if (!expect(fd >= 0, "open whoami"))
		return;
	expect(read(fd, seen, sizeof(seen) - 1) > 0, "read whoami");
	close(fd);
	seen[strcspn(seen, "\n")] = '\0';
	snprintf(self, sizeof(self), "uid=%d gid=%d pid=%d", (int)getuid(), (int)getgid(), (int)getpid());
	fact("self %s", self);
	fact("whoami %s", seen);
	expect(strcmp(self, seen) == 0, "the daemon sees somebody else");
}

static void probe_owner(const char *name)
{
	struct stat st;

	if (!expect(stat(name, &st) == 0, name))
		return;
	fact("owner path=%s uid=%d gid=%d mode=%o", name, (int)st.st_uid, (int)st.st_gid, (unsigned)st.st_mode);
	expect(st.st_uid == getuid() && st.st_gid == getgid(), "owned by somebody else");
}

static void probe_write(const char *name)
{
	static const char written[] = "written through the mount";
	char back[sizeof(written)] = "";
	int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640);

	if (!expect(fd >= 0, "create"))
		return;
	expect(write(fd, written, sizeof(written)) == (ssize_t)sizeof(written), "write");
	expect(pread(fd, back, sizeof(back), 0) == (ssize_t)sizeof(back), "read back");
	fact("read-back=%s", back);
	expect(memcmp(written, back, sizeof(back)) == 0, "read back something else");
	expect(ftruncate(fd, 7) == 0 && lseek(fd, 0, SEEK_END) == 7, "truncate");
	expect(close(fd) == 0, "close");
	probe_owner(name);
	expect(unlink(name) == 0, "unlink");
}

/* In a process of its own, so that nothing of it (cwd, open files) keeps the mount busy when it is unmounted. */
static int probe_as_reader(const char *mountpoint)
{
	struct statfs fs;
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		if (expect(chdir(mountpoint) == 0, "chdir to the mount")) {
			probe_whoami();
			probe_owner(".");
			probe_owner("whoami");
			probe_write("files/probe");
			if (expect(statfs(".", &fs) == 0, "statfs"))
				fact("statfs type=0x%lx blocks=%ld", (unsigned long)fs.f_type, (long)fs.f_blocks);
		}
		exit(problems != 0);
	}
	return wait_for(pid);
}

/* As the user of a FUSE program does it. SIGTERM to the daemon would not do for root without CAP_SYS_ADMIN:
   libfuse then tries umount2 and never asks the helper. */
static int run_fusermount_u(const char *mountpoint)
{
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		execlp(FUSERMOUNT, FUSERMOUNT, "-u", "--", mountpoint, (char *)NULL);
		_exit(127);
	}
	return wait_for(pid);
}

static int probe(char *program, char *mountpoint, char *options)
{
	char line[8192];
	int mounts_before = count_mounts(mountpoint, line, sizeof(line));
	pid_t server = start_server(program, mountpoint, options);
	int mounted = wait_until_mounted(mountpoint, server, mounts_before);
	int status;

	fact("mounted=%s", mounted ? "yes" : "no");
	errno = 0;
	if (expect(mounted, "not mounted")) {
		status = probe_as_reader(mountpoint);
		expect(status == 0, "reader failed");
		status = run_fusermount_u(mountpoint);
		fact("unmount-status=%d", status);
		expect(status == 0, FUSERMOUNT " -u failed");
		if (status != 0)
			kill(server, SIGTERM);
	}
	status = wait_for(server);
	fact("server-status=%d", status);
	if (status == -1)
		kill(server, SIGKILL);
	expect(status == 0, "the server failed");
	status = count_mounts(mountpoint, line, sizeof(line)) - mounts_before;
	fact("left-mounted=%d", status);
	expect(status == 0, "something is left mounted");
	fact("ok=%s", problems ? "no" : "yes");
	return problems != 0;
}

int main(int argc, char *argv[])
{
	if (argc == 2 && strcmp(argv[1], "--pause") == 0)
		return pause_until_told();
	if (argc == 3 && strcmp(argv[1], "--probe") == 0)
		return probe(argv[0], argv[2], NULL);
	if (argc == 5 && strcmp(argv[1], "--probe") == 0 && strcmp(argv[3], "-o") == 0)
		return probe(argv[0], argv[2], argv[4]);
	return fuse_main(argc, argv, &operations, NULL);
}
