//! fuser_0_16 [--auto-unmount] MOUNTPOINT: fuser 0.16, the last one with the old way to mount.
use fuser_0_16 as fuser;

macro_rules! getattr {
    () => {
        fn getattr(&mut self, _: &Request<'_>, inode: u64, _handle: Option<u64>, reply: ReplyAttr) {
            reply.attr(&TTL, &attributes(inode, self.content.len()));
        }
    };
}

include!("../serve.rs");
include!("../before_0_17.rs");
