#!/usr/bin/env bash
# The demonstration of `make demo`: a lab of virtual machines, one of them with stand-in GPUs, a cluster on them, a
# workload and a GPU job. Each command is printed before it runs; all of them can be run by hand in the folder demo/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

gpunodes=$PWD/.venv/bin/gpunodes
mkdir -p demo
cd demo

# The lab creates network namespaces and virtual machines, so it needs root; the other commands do not.
as_root=()
((EUID == 0)) || as_root=(sudo)

bold='' plain=''
[[ -t 1 ]] && bold=$'\e[1m' plain=$'\e[0m'
heading() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() { heading "\$ gpunodes$(printf ' %q' "$@")"; }
gpunodes() { show "$@"; "$gpunodes" "$@"; }
lab() { show lab "$@"; "${as_root[@]}" "$gpunodes" lab "$@"; }
kubectl() { "${as_root[@]}" "$gpunodes" lab ssh control-1 sudo kubectl --kubeconfig /etc/kubernetes/admin.conf "$@"; }

started=$SECONDS
lab up --workers 1 --gpu-workers 1
gpunodes init-master control-1
gpunodes join 'worker-*' 'gpu-*'
gpunodes status

default() { sed -n "s/^$1: *//p" ../roles/settings/defaults/main.yml; }

heading "A web server on both workers, with a Service:"
image=$(default gpunodes_ready_image)
sed "s|IMAGE|$image|" ../tests/machines/workload.yml | kubectl apply -f -
kubectl rollout status deployment/hello --timeout=240s
kubectl get pods -l app=hello -o wide
address=$(kubectl get service hello -o 'jsonpath={.spec.clusterIP}')
heading "Four requests from the control plane to the Service at $address:"
for _ in 1 2 3 4; do
    "${as_root[@]}" "$gpunodes" lab ssh control-1 curl --silent --show-error --fail --max-time 20 "http://$address/"
done

heading "gpu-1 has stand-ins instead of GPUs and of NVIDIA's driver: code of this project's lab, which computes nothing.
This shows the software from the driver to a pod; nvidia-smi, container toolkit and device plugin are NVIDIA's own."
gpunodes gpu verify
heading "A job that requests a GPU, and its output of nvidia-smi:"
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
gpunodes health

# sudo searches for programs in its secure_path, not in the user's PATH.
lab_command='gpunodes lab'
((EUID == 0)) || lab_command="sudo $gpunodes lab"
cat <<END

Done in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s. Commands to try on the cluster:

    cd demo
    export PATH=$(dirname "$gpunodes"):\$PATH
    gpunodes status
    gpunodes join 'worker-*' 'gpu-*'            # a second run changes nothing
    gpunodes remove worker-1                    # undo: gpunodes join worker-1
    $lab_command fault gpu-1 lost        # then: gpunodes health; and: $lab_command fault gpu-1 clear
    $lab_command status
    $lab_command ssh control-1           # then: sudo kubectl --kubeconfig /etc/kubernetes/admin.conf get nodes
    $lab_command power worker-1 cycle

This command removes the lab completely:

    $lab_command down
END
