//! mountpoint_s3_fuser [--auto-unmount] [--allow-other] MOUNTPOINT: a file, hello, that can be read and written; on the fuser that
//! mountpoint-s3 brings with it.
use fuser::{MountOption, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyWrite, Request, TimeOrNow};
use std::ffi::OsStr;
use std::sync::Mutex;
use std::time::SystemTime;

include!("../../src/serve.rs");

/// An inode's number as this fuser has it.
fn number(inode: u64) -> u64 {
    inode
}

struct Hello {
    content: Mutex<Vec<u8>>,
}

impl Hello {
    fn attributes(&self, inode: u64) -> fuser::FileAttr {
        attributes(inode, self.content.lock().unwrap().len())
    }
}

impl fuser::Filesystem for Hello {
    fn lookup(&self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        if parent == 1 && name == "hello" {
            reply.entry(&TTL, &self.attributes(2), 0);
        } else {
            reply.error(libc::ENOENT);
        }
    }

    fn getattr(&self, _: &Request<'_>, inode: u64, _handle: Option<u64>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn setattr(
        &self,
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
            self.content.lock().unwrap().resize(size as usize, 0);
        }
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn read(
        &self,
        _: &Request<'_>,
        _inode: u64,
        _handle: u64,
        offset: i64,
        size: u32,
        _flags: i32,
        _lock_owner: Option<u64>,
        reply: ReplyData,
    ) {
        reply.data(read_at(&self.content.lock().unwrap(), offset as usize, size as usize));
    }

    fn write(
        &self,
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
        write_at(&mut self.content.lock().unwrap(), offset as usize, data);
        reply.written(data.len() as u32);
    }

    fn readdir(&self, _: &Request<'_>, _inode: u64, _handle: u64, offset: i64, mut reply: ReplyDirectory) {
        if offset == 0 {
            let _ = reply.add(2, 1, fuser::FileType::RegularFile, "hello");
        }
        reply.ok();
    }
}

fn main() {
    let (arguments, signals) = (arguments(), block_sigterm());
    let mut options = vec![MountOption::FSName("mountpoint-s3".to_string())];
    if arguments.auto_unmount {
        options.push(MountOption::AutoUnmount); // which adds allow_other
    }
    if arguments.allow_other {
        options.push(MountOption::AllowOther); // or fuser itself refuses all users but the program's, even root
    }
    let hello = Hello { content: Mutex::new(b"hello\n".to_vec()) };
    match fuser::spawn_mount2(hello, arguments.mountpoint, &options) {
        Ok(session) => serve(session, signals),
        Err(error) => {
            eprintln!("fuser: {error}");
            std::process::exit(1);
        }
    }
}
