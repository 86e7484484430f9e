// What the programs share: how they are called, and how they end.

use std::time::{Duration, UNIX_EPOCH};

/// The arguments: `[--auto-unmount] [--allow-other] MOUNTPOINT`.
struct Arguments {
    auto_unmount: bool,
    #[allow(dead_code)] // only mountpoint_s3_fuser heeds it
    allow_other: bool,
    mountpoint: String,
}

fn arguments() -> Arguments {
    let mut arguments = Arguments { auto_unmount: false, allow_other: false, mountpoint: String::new() };
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--auto-unmount" => arguments.auto_unmount = true,
            "--allow-other" => arguments.allow_other = true,
            _ => arguments.mountpoint = argument,
        }
    }
    arguments
}

/// Keeps SIGTERM for `serve`. To be called before there are threads.
fn block_sigterm() -> libc::sigset_t {
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut signals);
        libc::sigaddset(&mut signals, libc::SIGTERM);
        libc::sigprocmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut());
        signals
    }
}

/// Returns when the session has ended, or at SIGTERM; dropping the session unmounts.
fn serve(session: fuser::BackgroundSession, signals: libc::sigset_t) {
    let moment = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    while !session.guard.is_finished() {
        if unsafe { libc::sigtimedwait(&signals, std::ptr::null_mut(), &moment) } == libc::SIGTERM {
            break;
        }
    }
    drop(session);
}

const TTL: Duration = Duration::from_secs(0);

/// The root directory, 1, or its one file, 2, which holds `size` bytes.
fn attributes(inode: u64, size: usize) -> fuser::FileAttr {
    let is_root = inode == 1;
    fuser::FileAttr {
        ino: number(inode),
        size: if is_root { 0 } else { size as u64 },
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if is_root { fuser::FileType::Directory } else { fuser::FileType::RegularFile },
        perm: if is_root { 0o755 } else { 0o666 },
        nlink: 1,
        uid: unsafe { libc::getuid() },
        gid: unsafe { libc::getgid() },
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn read_at(content: &[u8], offset: usize, size: usize) -> &[u8] {
    let start = offset.min(content.len());
    &content[start..(start + size).min(content.len())]
}

fn write_at(content: &mut Vec<u8>, offset: usize, data: &[u8]) {
    let end = offset + data.len();
    content.resize(content.len().max(end), 0);
    content[offset..end].copy_from_slice(data);
}
