//! `mount-s3`, as far as the example and the template of Mountpoint for Amazon S3 call it: no registry has AWS's
//! program, but the library that is its filesystem.

use anyhow::{Context, Result};
use clap::Parser;
use mountpoint_s3_client::config::{AddressingStyle, S3ClientAuthConfig};
use mountpoint_s3_client::user_agent::UserAgent;
use mountpoint_s3_fs::fuse::config::{FuseOptions, FuseSessionConfig, MountPoint};
use mountpoint_s3_fs::prefix::Prefix;
use mountpoint_s3_fs::s3::config::{ClientConfig, PartConfig, Region, S3Path, TargetThroughputSetting};
use mountpoint_s3_fs::s3::S3Personality;
use mountpoint_s3_fs::{MountpointConfig, Runtime, S3FilesystemConfig, Superblock, SuperblockConfig};

const PART_SIZE: usize = 8 << 20;
const THREADS: usize = 16;

#[derive(Parser)]
struct Arguments {
    bucket: String,
    directory: String,
    /// It never runs in the background.
    #[arg(long, required = true)]
    foreground: bool,
    #[arg(long)]
    allow_other: bool,
    #[arg(long)]
    read_only: bool,
    #[arg(long, default_value = "")]
    prefix: String,
    #[arg(long)]
    region: String,
    #[arg(long)]
    endpoint_url: Option<String>,
    #[arg(long)]
    force_path_style: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let path = S3Path { bucket_name: arguments.bucket, prefix: Prefix::new(&arguments.prefix)? };
    let options = FuseOptions {
        allow_other: arguments.allow_other,
        read_only: arguments.read_only,
        allow_root: false,
        auto_unmount: false,
    };
    let client_config = ClientConfig {
        region: Region::new_user_specified(arguments.region),
        endpoint_url: arguments.endpoint_url,
        addressing_style: if arguments.force_path_style { AddressingStyle::Path } else { AddressingStyle::Automatic },
        dual_stack: false,
        transfer_acceleration: false,
        auth_config: S3ClientAuthConfig::Default,
        requester_pays: false,
        expected_bucket_owner: None,
        throughput_target: TargetThroughputSetting::Default,
        bind: None,
        part_config: PartConfig::with_part_size(PART_SIZE),
        user_agent: UserAgent::new(None),
    };
    let client = client_config.create_client(Some(&path)).context("the bucket can't be read")?;
    let runtime = Runtime::new(client.event_loop_group());

    let filesystem = S3FilesystemConfig::default();
    let superblock = SuperblockConfig {
        cache_config: filesystem.cache_config.clone(),
        s3_personality: S3Personality::Standard,
    };
    let session = FuseSessionConfig::new(MountPoint::new(&arguments.directory)?, options, THREADS)?;
    MountpointConfig::new(session, filesystem, Default::default())
        .create_fuse_session(Superblock::new(client.clone(), &path.bucket_name, &path.prefix, superblock), client, runtime)?
        .join()
}
