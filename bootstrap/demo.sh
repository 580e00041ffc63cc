#!/usr/bin/env bash
# The demonstration that `make demo` runs: a lab of virtual machines, one of them with stand-in GPUs, a cluster on it by
# the product's own commands, a workload and a GPU job on the cluster. Each command is shown before it runs; all of them
# can be typed by hand in the folder demo/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

gpunodes=$PWD/.venv/bin/gpunodes
mkdir -p demo
cd demo

# The lab makes network namespaces and virtual machines, so it needs root; nothing else here does.
as_root=()
((EUID == 0)) || as_root=(sudo)

bold='' plain=''
[[ -t 1 ]] && bold=$'\e[1m' plain=$'\e[0m'
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() { say "\$ gpunodes$(printf ' %q' "$@")"; }
product() { show "$@"; "$gpunodes" "$@"; }
lab() { show lab "$@"; "${as_root[@]}" "$gpunodes" lab "$@"; }
kubectl() { "${as_root[@]}" "$gpunodes" lab ssh control-1 sudo kubectl --kubeconfig /etc/kubernetes/admin.conf "$@"; }

began=$SECONDS
lab up --workers 1 --gpu-workers 1
product init-master control-1
product join 'worker-*' 'gpu-*'
product status

default() { sed -n "s/^$1: *//p" ../roles/settings/defaults/main.yml; }

say "A web server on both workers, and a Service before them:"
image=$(default gpunodes_ready_image)
sed "s|IMAGE|$image|" ../tests/machines/workload.yml | kubectl apply -f -
kubectl rollout status deployment/hello --timeout=240s
kubectl get pods -l app=hello -o wide
address=$(kubectl get service hello -o 'jsonpath={.spec.clusterIP}')
say "The Service at $address, asked from the control plane four times:"
for _ in 1 2 3 4; do
    "${as_root[@]}" "$gpunodes" lab ssh control-1 curl --silent --show-error --fail --max-time 20 "http://$address/"
done

say "gpu-1 has stand-ins: code of this project's lab in the place of GPUs and of NVIDIA's driver, which computes nothing.
What is shown is the way of the software, from the driver to a pod; nvidia-smi, toolkit and device plugin are NVIDIA's own."
product gpu verify
say "A job that asks for a GPU, and what nvidia-smi says in it:"
image=$(default gpunodes_device_plugin_image)
kubectl apply -f - <<END
apiVersion: batch/v1
kind: Job
metadata: {name: nvidia-smi}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: nvidia-smi
          image: $image
          command: [nvidia-smi]
          resources: {limits: {nvidia.com/gpu: 1}}
END
kubectl wait --for=condition=Complete job/nvidia-smi --timeout=240s
kubectl logs job/nvidia-smi
product health

# sudo looks for programs where the administrator says, not on our PATH.
lab_words='gpunodes lab'
((EUID == 0)) || lab_words="sudo $gpunodes lab"
cat <<END

Done in $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s. The cluster is yours to try:

    cd demo
    export PATH=$(dirname "$gpunodes"):\$PATH
    gpunodes status
    gpunodes join 'worker-*' 'gpu-*'            # again: changes nothing
    gpunodes remove worker-1                    # and: gpunodes join worker-1
    $lab_words fault gpu-1 lost        # then: gpunodes health; and: $lab_words fault gpu-1 clear
    $lab_words status
    $lab_words ssh control-1           # then: sudo kubectl --kubeconfig /etc/kubernetes/admin.conf get nodes
    $lab_words power worker-1 cycle

It ends, and leaves nothing behind, with:

    $lab_words down
END
