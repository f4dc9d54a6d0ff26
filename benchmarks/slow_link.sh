#!/bin/bash
# Runs a command as if on host nodea, with a host nodeb behind a link of 1 Gbit/s: two network
# namespaces on this machine, whose virtual cards a bridge joins and tc slows down. As root, with
# iproute2 and Open MPI:
#
#     benchmarks/slow_link.sh python -m hvdtrain bench collectives -np 4 -hostfile HOSTS
#
# The word HOSTS becomes the name of a hostfile with two slots on each host; SLOTS=1 makes it one.
# RATE=10gbit names another rate, NODES=8 makes hosts nodea to nodeh. Nothing of it is left behind.
set -euo pipefail

rate=${RATE:-1gbit}
work=$(mktemp -d)
nodes=({a..z})
nodes=("${nodes[@]:0:${NODES:-2}}")
nodes=("${nodes[@]/#/node}")
trap 'for node in "${nodes[@]}" switch; do ip netns del "hvd-$node" 2> /dev/null || true; done; rm -rf "$work"' EXIT

echo '127.0.0.1 localhost' > "$work/names"
ip netns add hvd-switch
ip -n hvd-switch link add bridge type bridge
ip -n hvd-switch link set bridge up
for node in "${nodes[@]}"; do
  ip netns add "hvd-$node"
  ip -n "hvd-$node" link set lo up
  echo "$node slots=${SLOTS:-2}" >> "$work/hosts"
  address=10.77.0.$(wc -l < "$work/hosts")
  echo "$address $node" >> "$work/names"
  ip link add hvd0 netns "hvd-$node" type veth peer name "$node" netns hvd-switch
  ip -n hvd-switch link set "$node" master bridge up
  ip -n "hvd-$node" addr add "$address/24" dev hvd0
  ip -n "hvd-$node" link set hvd0 up
  tc -n "hvd-$node" qdisc add dev hvd0 root tbf rate "$rate" burst 1mb latency 50ms
done

# node NODE COMMAND gives a command a name and a network of its own.
cat > "$work/node" << NODE
#!/bin/bash
exec ip netns exec "hvd-\$1" unshare --uts --mount bash -c \
  "hostname \$1; mount --bind $work/names /etc/hosts; \${*:2}"
NODE
# Stands in for ssh; with processes of its own, too, by which hvdtrain knows what is a node, and
# with a folder of its own for files that Open MPI names by their numbers.
cat > "$work/agent" << AGENT
#!/bin/bash
while [[ \$1 == -* ]]; do shift; done
node=\$1
shift
export TMPDIR="$work/\$node.files"
mkdir -p "\$TMPDIR"
exec unshare --pid --fork --kill-child --mount-proc "$work/node" "\$node" "\$*"
AGENT
chmod +x "$work/node" "$work/agent"

export PRTE_MCA_plm_ssh_agent="$work/agent" PRTE_MCA_prte_if_include=10.77.0.0/24
export OMPI_MCA_btl_tcp_if_include=10.77.0.0/24 OMPI_MCA_btl=self,sm,tcp OMPI_MCA_pml=ob1
export GLOO_SOCKET_IFNAME=hvd0
"$work/node" nodea "$(printf '%q ' "${@//HOSTS/$work/hosts}")"
