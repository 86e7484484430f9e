// The filesystem for fuser before 0.17: a file, hello, that can be read and written.

use fuser::{MountOption, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyWrite, Request, TimeOrNow};
use std::ffi::OsStr;
use std::time::SystemTime;

/// An inode's number as this fuser has it.
fn number(inode: u64) -> u64 {
    inode
}

struct Hello {
    content: Vec<u8>,
}

impl fuser::Filesystem for Hello {
    fn lookup(&mut self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        if parent == 1 && name == "hello" {
            reply.entry(&TTL, &attributes(2, self.content.len()), 0);
        } else {
            reply.error(libc::ENOENT);
        }
    }

    getattr!();

    fn setattr(
        &mut self,
        _: &Request<'_>,
        inode: u64,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<u64>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<u32>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            self.content.resize(size as usize, 0);
        }
        reply.attr(&TTL, &attributes(inode, self.content.len()));
    }

    fn read(
        &mut self,
        _: &Request<'_>,
        _inode: u64,
        _handle: u64,
        offset: i64,
        size: u32,
        _flags: i32,
        _lock_owner: Option<u64>,
        reply: ReplyData,
    ) {
        reply.data(read_at(&self.content, offset as usize, size as usize));
    }

    fn write(
        &mut self,
        _: &Request<'_>,
        _inode: u64,
        _handle: u64,
        offset: i64,
        data: &[u8],
        _write_flags: u32,
        _flags: i32,
        _lock_owner: Option<u64>,
        reply: ReplyWrite,
    ) {
        write_at(&mut self.content, offset as usize, data);
        reply.written(data.len() as u32);
    }

    fn readdir(&mut self, _: &Request<'_>, _inode: u64, _handle: u64, offset: i64, mut reply: ReplyDirectory) {
        if offset == 0 {
            let _ = reply.add(2, 1, fuser::FileType::RegularFile, "hello");
        }
        reply.ok();
    }
}

fn main() {
    let (arguments, signals) = (arguments(), block_sigterm());
    let mut options = vec![MountOption::FSName("fuser".to_string())];
    if arguments.auto_unmount {
        options.push(MountOption::AutoUnmount); // which adds allow_other
    }
    let hello = Hello { content: b"hello\n".to_vec() };
    match fuser::spawn_mount2(hello, arguments.mountpoint, &options) {
        Ok(session) => serve(session, signals),
        Err(error) => {
            eprintln!("fuser: {error}");
            std::process::exit(1);
        }
    }
}
