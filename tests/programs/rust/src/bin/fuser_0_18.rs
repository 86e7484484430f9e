//! fuser_0_18 [--auto-unmount] MOUNTPOINT: a file, hello, that can be read and written; on fuser 0.18.
use fuser::{
    BsdFileFlags, Config, Errno, FileHandle, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr,
    ReplyData, ReplyDirectory, ReplyEntry, ReplyWrite, Request, SessionACL, TimeOrNow, WriteFlags,
};
use fuser_0_18 as fuser;
use std::ffi::OsStr;
use std::sync::Mutex;
use std::time::SystemTime;

include!("../serve.rs");

/// An inode's number as this fuser has it.
fn number(inode: u64) -> INodeNo {
    INodeNo(inode)
}

struct Hello {
    content: Mutex<Vec<u8>>,
}

impl Hello {
    fn attributes(&self, inode: INodeNo) -> fuser::FileAttr {
        attributes(inode.into(), self.content.lock().unwrap().len())
    }
}

impl fuser::Filesystem for Hello {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == "hello" {
            reply.entry(&TTL, &self.attributes(INodeNo(2)), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            self.content.lock().unwrap().resize(size as usize, 0);
        }
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn read(
        &self,
        _: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(read_at(&self.content.lock().unwrap(), offset as usize, size as usize));
    }

    fn write(
        &self,
        _: &Request,
        _inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        write_at(&mut self.content.lock().unwrap(), offset as usize, data);
        reply.written(data.len() as u32);
    }

    fn readdir(&self, _: &Request, _inode: INodeNo, _handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        if offset == 0 {
            let _ = reply.add(INodeNo(2), 1, fuser::FileType::RegularFile, "hello");
        }
        reply.ok();
    }
}

fn main() {
    let (arguments, signals) = (arguments(), block_sigterm());
    let mut config = Config::default();
    config.mount_options.push(MountOption::FSName("fuser".to_string()));
    if arguments.auto_unmount {
        config.mount_options.push(MountOption::AutoUnmount);
        config.acl = SessionACL::All; // fuser insists on it with AutoUnmount
    }
    let hello = Hello { content: Mutex::new(b"hello\n".to_vec()) };
    match fuser::spawn_mount(hello, arguments.mountpoint, &config) {
        Ok(session) => serve(session, signals),
        Err(error) => {
            eprintln!("fuser: {error}");
            std::process::exit(1);
        }
    }
}
