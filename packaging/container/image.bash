# What the scripts that build images have in common. They set `here`, `work`, `output`, `repository` and `version`.
#
# ARCH is the architecture of the image, by Debian's name; if it isn't this machine's, packages are installed emulated.
# REVISION is the commit of git that the image says it is made of; without, it says nothing.

native=$(dpkg --print-architecture)
: "${ARCH:=$native}"
emulated=()
foreign=()
if [ "$ARCH" != "$native" ]; then
    emulated=(/usr/bin/python3 "$here/../emulated.py")
    foreign=("--architectures=$ARCH")
fi
# Where the sources are, as the metadata of the package have it.
source_url=$(sed -n 's/^ *Source = //p' "$here/../../setup.cfg")

# Lines of sources.list(5): where apt on this machine has the release that runs on it.
debian_archives() {
    local codename
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
        'Created-By: Packages' 'Origin: Debian' 'Component: main' |
        grep -E " $codename(-[a-z]+)* main$" | sort --unique || {
        echo "build: apt knows no archive of Debian's $codename: run apt-get update, or see sources.list(5)" >&2
        return 1
    }
}

# A root filesystem with these packages, and what they need, as an archive: with licences, without manuals; and with
# nothing of the machine that builds. More options are for mmdebstrap. Its hook is for usrmerge, which would bring all
# of Perl.
debian_root() {
    local packages=$1 archive=$2
    shift 2
    "${emulated[@]}" mmdebstrap --quiet --mode=root "${foreign[@]}" --variant=essential --skip=output/dev \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/info/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/lib/*/gconv/*' \
        --customize-hook='rm -rf "$1"/etc/apt/sources.list* "$1"/var/log/*' \
        --customize-hook='rm -f "$1"/etc/resolv.conf "$1"/etc/hostname' \
        "$@" '' "$archive" "$work/sources.list" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
}

# Podman with a store of its own, of which nothing is left: images that users have are none of this script's business.
engine() {
    podman --root "$work/store" --runroot "$work/run" --tmpdir "$work/tmp" --storage-driver vfs "$@"
}

# Docker's format, because OCI's has no health check; every engine reads it.
image() {
    local name=$1 context=$2
    engine build --quiet --layers=false --format=docker --identity-label=false --network=none \
        --timestamp="$SOURCE_DATE_EPOCH" --build-arg="VERSION=$version" --arch="$ARCH" \
        --label="org.opencontainers.image.source=$source_url" \
        ${REVISION:+"--label=org.opencontainers.image.revision=$REVISION"} \
        --file "$here/${context##*/}.Containerfile" --tag "$repository/$name:$version" "$context" >/dev/null
    engine save --quiet --format docker-archive --output "$work/$name.tar" "$repository/$name:$version"
    /usr/bin/python3 "$here/normalize.py" "$work/$name.tar" "$output/$name.tar"
}
