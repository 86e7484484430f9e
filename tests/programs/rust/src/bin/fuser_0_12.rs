//! fuser_0_12 [--auto-unmount] MOUNTPOINT: fuser 0.12, of 2022.
use fuser_0_12 as fuser;

macro_rules! getattr {
    () => {
        fn getattr(&mut self, _: &Request<'_>, inode: u64, reply: ReplyAttr) {
            reply.attr(&TTL, &attributes(inode, self.content.len()));
        }
    };
}

include!("../serve.rs");
include!("../before_0_17.rs");
