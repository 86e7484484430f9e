// jacobsa MOUNTPOINT: a file, hello, that can be read and written; on github.com/jacobsa/fuse.
// Serves in the foreground until it is unmounted; SIGTERM makes it unmount.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/jacobsa/fuse"
	"github.com/jacobsa/fuse/fuseops"
	"github.com/jacobsa/fuse/fuseutil"
)

const helloInode = fuseops.RootInodeID + 1

type hello struct {
	fuseutil.NotImplementedFileSystem
	lock    sync.Mutex
	content []byte
}

// attributes is called with the lock held.
func (fs *hello) attributes(inode fuseops.InodeID) fuseops.InodeAttributes {
	if inode == fuseops.RootInodeID {
		return fuseops.InodeAttributes{Nlink: 1, Mode: os.ModeDir | 0o755}
	}
	return fuseops.InodeAttributes{Nlink: 1, Mode: 0o666, Size: uint64(len(fs.content))}
}

// resize is called with the lock held.
func (fs *hello) resize(size int) {
	content := make([]byte, size)
	copy(content, fs.content)
	fs.content = content
}

func (fs *hello) StatFS(context.Context, *fuseops.StatFSOp) error { return nil }

func (fs *hello) LookUpInode(_ context.Context, op *fuseops.LookUpInodeOp) error {
	fs.lock.Lock()
	defer fs.lock.Unlock()
	if op.Parent != fuseops.RootInodeID || op.Name != "hello" {
		return fuse.ENOENT
	}
	op.Entry.Child, op.Entry.Attributes = helloInode, fs.attributes(helloInode)
	return nil
}

func (fs *hello) GetInodeAttributes(_ context.Context, op *fuseops.GetInodeAttributesOp) error {
	fs.lock.Lock()
	defer fs.lock.Unlock()
	op.Attributes = fs.attributes(op.Inode)
	return nil
}

func (fs *hello) SetInodeAttributes(_ context.Context, op *fuseops.SetInodeAttributesOp) error {
	fs.lock.Lock()
	defer fs.lock.Unlock()
	if op.Size != nil {
		fs.resize(int(*op.Size))
	}
	op.Attributes = fs.attributes(op.Inode)
	return nil
}

func (fs *hello) OpenDir(context.Context, *fuseops.OpenDirOp) error { return nil }

func (fs *hello) ReadDir(_ context.Context, op *fuseops.ReadDirOp) error {
	if op.Offset == 0 {
		entry := fuseutil.Dirent{Offset: 1, Inode: helloInode, Name: "hello", Type: fuseutil.DT_File}
		op.BytesRead = fuseutil.WriteDirent(op.Dst, entry)
	}
	return nil
}

func (fs *hello) OpenFile(context.Context, *fuseops.OpenFileOp) error { return nil }

func (fs *hello) ReadFile(_ context.Context, op *fuseops.ReadFileOp) error {
	fs.lock.Lock()
	defer fs.lock.Unlock()
	if op.Offset < int64(len(fs.content)) {
		op.BytesRead = copy(op.Dst, fs.content[op.Offset:])
	}
	return nil
}

func (fs *hello) WriteFile(_ context.Context, op *fuseops.WriteFileOp) error {
	fs.lock.Lock()
	defer fs.lock.Unlock()
	if end := int(op.Offset) + len(op.Data); end > len(fs.content) {
		fs.resize(end)
	}
	copy(fs.content[op.Offset:], op.Data)
	return nil
}

func (fs *hello) FlushFile(context.Context, *fuseops.FlushFileOp) error { return nil }

func main() {
	mountpoint := os.Args[1]
	server := fuseutil.NewFileSystemServer(&hello{content: []byte("hello\n")})
	mounted, err := fuse.Mount(mountpoint, server, &fuse.MountConfig{FSName: "jacobsa", Subtype: "jacobsa"})
	if err != nil {
		log.Fatal(err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		if err := fuse.Unmount(mountpoint); err != nil {
			log.Fatal(err)
		}
	}()
	if err := mounted.Join(context.Background()); err != nil {
		log.Fatal(err)
	}
}
