#!/usr/bin/env bash
# A real one-node Slurm for tests/test_slurm.py on this Debian or Ubuntu machine. As root: tests/start_slurm.sh
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 1
}

MARK="# Made by tests/start_slurm.sh"
if timeout 10 sinfo >/dev/null 2>&1; then
    echo "a Slurm answers already"
    exit
fi
[[ $(id -u) == 0 ]] || fail "Slurm's daemons are installed and started as root"
if [[ -e /etc/slurm/slurm.conf ]] && ! grep -qx "$MARK" /etc/slurm/slurm.conf; then
    fail "/etc/slurm/slurm.conf is not from here and its Slurm does not answer; it was left alone"
fi
if ! command -v slurmctld slurmd munged >/dev/null; then
    command -v apt-get >/dev/null || fail "no apt-get here; install Slurm and munge by hand"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
fi

# Eight CPUs, so that tests do not wait for each other, and two GPUs are made up. cred_expire is also how long a
# requeued job has to wait.
mkdir -p /etc/slurm /var/spool/slurmctld /var/spool/slurmd
cat >/etc/slurm/slurm.conf <<CONF
$MARK
ClusterName=sdar-test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
GresTypes=gpu
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
echo "Name=gpu File=/dev/null,/dev/zero" >/etc/slurm/gres.conf

install -d -o munge -g munge /run/munge
pgrep -x munged >/dev/null || runuser -u munge -- munged
pgrep -x slurmctld >/dev/null || slurmctld
pgrep -x slurmd >/dev/null || slurmd
for _ in {1..60}; do
    if [[ $(timeout 10 sinfo -h -o %t 2>/dev/null) == idle ]]; then
        echo "Slurm is up"
        exit
    fi
    sleep 0.5
done
tail -n 5 /var/log/slurmctld.log /var/log/slurmd.log >&2
fail "Slurm did not come up within half a minute"
