module callers

go 1.24

require (
	bazil.org/fuse v0.0.0-20230120002735-62a210ff1fd5
	github.com/hanwen/go-fuse/v2 v2.12.1
	github.com/jacobsa/fuse v0.0.0-20260630194014-a124548f6da7
)

require golang.org/x/sys v0.31.0 // indirect
