// gofuse MOUNTPOINT: a file, hello, that can be read and written; on github.com/hanwen/go-fuse/v2.
// Serves in the foreground until it is unmounted; SIGTERM makes it unmount.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

type root struct{ fs.Inode }

func (r *root) OnAdd(ctx context.Context) {
	file := &fs.MemRegularFile{Data: []byte("hello\n"), Attr: fuse.Attr{Mode: 0o666}}
	r.AddChild("hello", r.NewPersistentInode(ctx, file, fs.StableAttr{}), false)
}

func main() {
	server, err := fs.Mount(os.Args[1], &root{}, &fs.Options{MountOptions: fuse.MountOptions{Name: "gofuse"}})
	if err != nil {
		log.Fatal(err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		if err := server.Unmount(); err != nil {
			log.Fatal(err)
		}
	}()
	server.Wait()
}
