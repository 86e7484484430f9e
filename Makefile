# `make help` lists the targets. On a fresh Debian 12, as root, each target installs the packages that it is missing.

SHELL := /bin/bash
# The distribution's Python: the proxy is linked with its static library, and the bytecode has to match.
PYTHON ?= /usr/bin/python3
VENV := .venv
MACHINE_x86_64 := amd64
MACHINE_aarch64 := arm64
NATIVE := $(MACHINE_$(shell uname -m))
ARCH ?= $(NATIVE)
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' fusermount3_proxy/__init__.py)
PROXY := build/static/$(if $(filter-out $(NATIVE),$(ARCH)),$(ARCH)/)fusermount3-proxy

# Packages for the venv, the lint and the static build; the end-to-end tests and the demo need the lab's packages, too.
BUILD_PACKAGES := gcc libc6-dev pkgconf libpython3-dev libsystemd-dev libattr1-dev python3-venv binutils strace
# Packages for building the images.
IMAGE_PACKAGES := podman mmdebstrap dpkg-dev
# Packages for the images and packages of another architecture, which are built emulated.
RELEASE_PACKAGES := qemu-user-static arch-test zstd
# Packages for linking for an architecture other than the machine's.
CROSS_PACKAGES_amd64 := gcc-x86-64-linux-gnu libc6-dev-amd64-cross
CROSS_PACKAGES_arm64 := gcc-aarch64-linux-gnu libc6-dev-arm64-cross
LAB_PACKAGES := $(shell sed 's/\#.*//' tests/lab/apt-packages)

.DEFAULT_GOAL := help
.PHONY: help
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

# The mounter's programs, where the modules are that the venv uses; made together.
MOUNTER := broker/fusermount3_broker/mounter
PROGRAMS := $(MOUNTER)/superblock_creator $(MOUNTER)/plain_call
$(PROGRAMS) &: $(wildcard $(MOUNTER)/*.[ch]) packaging/mounter_programs.py | build-packages
	PYTHONPATH=.:broker $(PYTHON) packaging/mounter_programs.py

.PHONY: venv
venv: $(VENV)/installed $(PROGRAMS)  ## .venv with the broker, its dependencies, the tests' and the site's (fusermount3-broker is in .venv/bin)

# An environment variable, because pip builds the package with tools in a place of its own that options don't reach.
$(VENV)/installed: export PIP_CONSTRAINT := $(abspath constraints.txt)
$(VENV)/installed: setup.cfg setup.py pyproject.toml constraints.txt | build-packages
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --use-pep517 --editable '.[controller,test,docs]'
	touch $@

.PHONY: constraints
constraints: | build-packages  ## the newest releases of all tools into constraints.txt; then `make lint test`
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/pip install --quiet --use-pep517 --editable '.[controller,test,docs]'
	sed --in-place '/^#/!d' constraints.txt
	build/newest/bin/pip freeze --all --exclude pip --exclude-editable >> constraints.txt

.PHONY: static
static: $(PROXY)  ## the static proxy: build/static/fusermount3-proxy; ARCH=arm64: build/static/arm64/fusermount3-proxy

SOURCES := $(wildcard fusermount3_proxy/*.py packaging/static/*)
build/static/fusermount3-proxy: $(SOURCES) | build-packages
	$(PYTHON) packaging/static/build.py --output $@

.PHONY: deb
deb: | deb-packages  ## Debian packages for the release that runs here: build/deb/*.deb
	rm -rf build/deb && mkdir -p build/deb
	packaging/export build/deb/fusermount3-proxy
	cd build/deb/fusermount3-proxy && dpkg-buildpackage --no-sign
	rm -rf build/deb/fusermount3-proxy

.PHONY: rpm
rpm:  ## RPM packages, on Fedora, with the static proxy that Debian or a release has: build/rpm/*.rpm
	packaging/rpm/build $(PROXY) build/rpm

# The commit that the images name; none if files have been changed since.
REVISION = $(shell [ -n "$$(git status --porcelain 2>&1)" ] || git rev-parse HEAD)

.PHONY: images
images: deb venv | image-packages  ## container images of broker and proxy, with bills of materials: build/images/*
	rm -rf build/images
	REVISION=$(REVISION) packaging/container/build build/deb build/images
	$(VENV)/bin/python packaging/container/sbom.py build/images/*.tar

# The libraries of the controller, in the versions of constraints.txt, for the distribution's Python.
CONTROLLER_WHEELS := build/controller-wheels
.PHONY: controller-image
controller-image: venv | image-packages  ## the container image of the controller, with its bill of materials: build/images/
	rm -rf $(CONTROLLER_WHEELS)
	$(VENV)/bin/python packaging/container/controller_wheels.py $(CONTROLLER_WHEELS)
	REVISION=$(REVISION) PIP=$(abspath $(VENV))/bin/pip packaging/container/build-controller $(CONTROLLER_WHEELS) build/images
	$(VENV)/bin/python packaging/container/sbom.py build/images/fusermount3-controller.tar

# Platform tags that PyPI accepts. A static executable needs no libc at all, and 2.17 is the oldest with a tag on both.
WHEEL_PLATFORM_amd64 := manylinux_2_17_x86_64
WHEEL_PLATFORM_arm64 := manylinux_2_17_aarch64
GNU_amd64 := x86_64-linux-gnu
GNU_arm64 := aarch64-linux-gnu

DIST := build/dist
# All but this release's wheels for other architectures, which are made by another run of `make wheel`.
.PHONY: empty-dist
empty-dist:
	[ ! -d $(DIST) ] || find $(DIST) -type f -not \( -name '*-$(VERSION)-*.whl' -not -name '*$(WHEEL_PLATFORM_$(ARCH)).whl' \) -delete

.PHONY: wheel
wheel: empty-dist venv $(PROXY)  ## sdist, and a wheel with the static proxy, as PyPI takes them: build/dist/; ARCH=arm64: for that
	$(if $(filter-out $(NATIVE),$(ARCH)),CC=$(GNU_$(ARCH))-gcc) \
	FUSERMOUNT3PROXY_EXECUTABLE=$(abspath $(PROXY)) $(VENV)/bin/python -m build --no-isolation --outdir $(DIST) \
		--config-setting=--build-option=--plat-name=$(WHEEL_PLATFORM_$(ARCH))
	$(VENV)/bin/twine check --strict $(DIST)/*

build/static/%/fusermount3-proxy: $(SOURCES) | build-packages
	packaging/install-packages $(CROSS_PACKAGES_$*)
	PYTHON=$(PYTHON) packaging/static/foreign-libpython $* $(@D)/libpython
	$(PYTHON) packaging/static/build.py --output $@ --arch $* --root $(@D)/libpython

# First, before anything is built for a target that can't run.
.PHONY: root
root:
	@[ "$$(id -u)" = 0 ] || { echo "make $(MAKECMDGOALS): needs root, as it runs a broker on this host: sudo make $(MAKECMDGOALS)" >&2; exit 1; }

.PHONY: demo
demo: root venv static lab-packages  ## an unmodified sshfs mounts in an unprivileged container, told step by step
	$(VENV)/bin/python -m tests.demo

.PHONY: demo-recording
demo-recording: root venv static lab-packages  ## docs/demo.svg: that demo, as an animated terminal
	$(VENV)/bin/python -m tests.demo_recording

.PHONY: cluster cluster-down
cluster: root venv static lab-packages  ## a Kubernetes node with the driver of this working tree, told step by step; it runs on
	$(VENV)/bin/python -m tests.cluster up

cluster-down: venv  ## end that node, and remove all of it
	$(VENV)/bin/python -m tests.cluster down

.PHONY: test
test: lint static lab-packages  ## the tests, without those that take long; as root, for most need containers and mounts
	$(VENV)/bin/python -m tests -m 'not long'

.PHONY: test-all
test-all: lint static lab-packages machine-packages  ## all tests, as CI runs them: also attacks by the thousand, hung programs, fuzzing, a soak, other kernels
	$(VENV)/bin/python -m tests --prefetch --durations=40
	$(VENV)/bin/python -m tests.machines --smoke

.PHONY: test-cluster
test-cluster: root venv static lab-packages  ## the tests that need a Kubernetes node; `make test-all` runs them, too. KUBERNETES=newest: on its newest release
	FUSERMOUNT3PROXY_TEST_KUBERNETES=$(KUBERNETES) $(VENV)/bin/python -m pytest tests/cluster

AWAY := 30
.PHONY: test-cluster-long
test-cluster-long: root venv static lab-packages  ## more of them, before each release; the report goes into docs/reliability.md
	FUSERMOUNT3PROXY_TEST_AWAY=$(AWAY) $(VENV)/bin/python -m tests.cluster.long

.PHONY: site-check
site-check: venv site-packages  ## the site in a browser, at two widths, and what axe says of it; `make release-check` does so, too
	$(VENV)/bin/python -m pytest tests/site

.PHONY: journeys
journeys: root venv static lab-packages  ## from a bare machine to a mount by the pages alone, into docs/where-it-runs.md; before each release
	$(VENV)/bin/python -m tests.journeys

.PHONY: lint
lint: venv  ## ruff and mypy --strict
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

.PHONY: bench
bench: root venv static lab-packages  ## what a mount costs beside the genuine fusermount3, into docs/performance.md; bounds under load
	$(VENV)/bin/python -m benchmarks --write

.PHONY: bench-controller
bench-controller: root venv  ## the controller with 1,000 simulated nodes and 10,000 pods, into docs/performance.md
	$(VENV)/bin/python -m benchmarks.controller --write

.PHONY: bench-claims
bench-claims: root venv static  ## how long until a pod reads the volume of a claim, on a real node, into docs/performance.md
	$(VENV)/bin/python -m benchmarks.claims --write

MINUTES := 20
.PHONY: soak
soak: root venv static lab-packages  ## MINUTES=20 of load with faults, each once, then at random; the report goes into docs/reliability.md
	$(VENV)/bin/python -m benchmarks.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --write

.PHONY: test-kernels
test-kernels: root venv static lab-packages machine-packages  ## the promises on other kernels, emulated: hours; the tables go into docs/compatibility.md
	$(VENV)/bin/python -m tests.machines
	$(VENV)/bin/python -m tests.machines.report

.PHONY: release-commit
release-commit: venv  ## VERSION=1.2.3: the version in all files that state it, as a commit and a tag
	$(VENV)/bin/python -m release.version $(VERSION)

.PHONY: release
release: venv image-packages release-packages  ## VERSION=1.2.3: that commit, and of it all files of the release: build/release/; an hour
	$(VENV)/bin/python -m release $(VERSION)

.PHONY: release-check
release-check: site-check journeys  ## VERSION=1.2.3: that in two fresh clones, which have to make the same bytes; two hours
	$(VENV)/bin/python -m release.check $(VERSION)

SECONDS := 60
.PHONY: fuzz
fuzz: venv  ## fuzz each parser for SECONDS=60; `make test-all` does so, too, beside the tests
	$(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS)

.PHONY: callers
callers: venv static lab-packages  ## write into docs/compatibility.md which programs work, from the tests that run them
	$(VENV)/bin/python -m tests.callers.table

.PHONY: site
site: venv  ## the documentation as a site: build/site/index.html
	rm -rf build/site
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --doctree-dir build/doctrees docs build/site

# A compiler this old, because its output works with Debian's protobuf 3.21 and with newer ones from PyPI.
PROTOC := build/protoc
.PHONY: csi
csi: $(PROTOC)/installed  ## generate csi_pb2.py and .pyi from csi.proto, after a change of that
	$(PROTOC)/bin/python -m grpc_tools.protoc -Ibroker --python_out=broker --pyi_out=broker fusermount3_broker/csi/csi.proto

.PHONY: device-plugin
device-plugin: $(PROTOC)/installed  ## the same for deviceplugin.proto
	$(PROTOC)/bin/python -m grpc_tools.protoc -Ibroker --python_out=broker --pyi_out=broker fusermount3_broker/injection/deviceplugin.proto

$(PROTOC)/installed: | build-packages
	$(PYTHON) -m venv $(PROTOC)
	$(PROTOC)/bin/pip install --quiet 'grpcio-tools==1.62.3' 'setuptools<81'
	touch $@

.PHONY: clean
clean:  ## remove what was built here (the cache of the tests' images stays, in ~/.cache)
	[ ! -e build/cluster ] || $(MAKE) cluster-down
	rm -rf build $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Install Debian packages only if one is missing, so that the other targets need no network.
.PHONY: build-packages image-packages release-packages lab-packages machine-packages site-packages
build-packages: PACKAGES := --or-tools $(BUILD_PACKAGES)
image-packages: PACKAGES := $(IMAGE_PACKAGES)
release-packages: PACKAGES := $(RELEASE_PACKAGES)
lab-packages: PACKAGES := $(LAB_PACKAGES)
machine-packages: PACKAGES := $(shell sed 's/\#.*//' tests/machines/apt-packages)
site-packages: PACKAGES := $(shell sed 's/\#.*//' tests/site/apt-packages)
build-packages image-packages release-packages lab-packages machine-packages site-packages:
	@packaging/install-packages $(PACKAGES)

.PHONY: deb-packages
deb-packages:
	@packaging/install-packages build-essential
	@dpkg-checkbuilddeps 2>/dev/null || { apt-get update -qq && apt-get build-dep -qq --yes ./ >/dev/null; }
