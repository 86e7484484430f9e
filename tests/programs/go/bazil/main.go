// bazil MOUNTPOINT: a file, hello, that can be read and written; on bazil.org/fuse.
// Serves in the foreground until it is unmounted; SIGTERM makes it unmount.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"bazil.org/fuse"
	"bazil.org/fuse/fs"
)

type root struct{ file file }

func (r *root) Root() (fs.Node, error) { return r, nil }

func (r *root) Attr(_ context.Context, attr *fuse.Attr) error {
	attr.Inode, attr.Mode = 1, os.ModeDir|0o755
	return nil
}

func (r *root) Lookup(_ context.Context, name string) (fs.Node, error) {
	if name != "hello" {
		return nil, syscall.ENOENT
	}
	return &r.file, nil
}

func (r *root) ReadDirAll(context.Context) ([]fuse.Dirent, error) {
	return []fuse.Dirent{{Inode: 2, Name: "hello", Type: fuse.DT_File}}, nil
}

type file struct {
	lock    sync.Mutex
	content []byte
}

func (f *file) Attr(_ context.Context, attr *fuse.Attr) error {
	f.lock.Lock()
	defer f.lock.Unlock()
	attr.Inode, attr.Mode, attr.Size = 2, 0o666, uint64(len(f.content))
	return nil
}

func (f *file) ReadAll(context.Context) ([]byte, error) {
	f.lock.Lock()
	defer f.lock.Unlock()
	return append([]byte(nil), f.content...), nil
}

// resize is called with the lock held.
func (f *file) resize(size int) {
	content := make([]byte, size)
	copy(content, f.content)
	f.content = content
}

func (f *file) Setattr(_ context.Context, request *fuse.SetattrRequest, _ *fuse.SetattrResponse) error {
	f.lock.Lock()
	defer f.lock.Unlock()
	if request.Valid.Size() {
		f.resize(int(request.Size))
	}
	return nil
}

func (f *file) Write(_ context.Context, request *fuse.WriteRequest, response *fuse.WriteResponse) error {
	f.lock.Lock()
	defer f.lock.Unlock()
	if end := int(request.Offset) + len(request.Data); end > len(f.content) {
		f.resize(end)
	}
	response.Size = copy(f.content[request.Offset:], request.Data)
	return nil
}

func main() {
	mountpoint := os.Args[1]
	connection, err := fuse.Mount(mountpoint, fuse.FSName("bazil"), fuse.Subtype("bazil"))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		if err := fuse.Unmount(mountpoint); err != nil {
			log.Fatal(err)
		}
	}()
	if err := fs.Serve(connection, &root{file: file{content: []byte("hello\n")}}); err != nil {
		log.Fatal(err)
	}
}
