# fish completion of fusermount3-proxy, as which fusermount3 runs where its package is installed.

function __fish_fusermount3_proxy_mountpoints
    # A blank in a mountpoint is \040 there, see proc_pid_mounts(5).
    awk '$3 ~ /^fuse(blk)?(\.|$)/ { print $2 }' /proc/self/mounts |
        string replace --all --regex '\\\\([0-7]{3})' '\\\\0$1' |
        while read --local mountpoint
            printf '%b\n' $mountpoint
        end
end

set --local options allow_other allow_root async atime auto_unmount default_permissions diratime dirsync exec fsname= \
    lazytime max_read= noatime nodiratime noexec nolazytime nostrictatime nosymfollow ro rw strictatime subtype= \
    symfollow sync

for program in fusermount3-proxy fusermount3
    complete --command $program --no-files
    complete --command $program --condition 'not __fish_contains_opt -s u unmount' --arguments '(__fish_complete_directories)'
    complete --command $program --condition '__fish_contains_opt -s u unmount' --arguments '(__fish_fusermount3_proxy_mountpoints)'
    complete --command $program --short-option h --long-option help --description 'Print a summary'
    complete --command $program --short-option V --long-option version --description 'Print the version'
    complete --command $program --short-option o --long-option options --exclusive --description 'Mount options' \
        --arguments "(__fish_append , $options)"
    complete --command $program --short-option u --long-option unmount --description 'Unmount'
    complete --command $program --short-option z --long-option lazy --description 'Detach now, even if busy'
    complete --command $program --short-option q --long-option quiet --description 'Do not say why it fails'
    complete --command $program --long-option auto-unmount --description 'Unmount when the FUSE program is gone'
    complete --command $program --long-option comm-fd --exclusive --description 'The socket to the FUSE program'
    complete --command $program --long-option sync-init --description 'Mount when the FUSE program is ready'
end
