# SPDX-License-Identifier: Apache-2.0
# What the dashboard agent of a node does if the packages of the dashboard are missing, without importing Ray for that.
# The arguments are the folder of the session and the id of the node.
for port in metrics_agent_port metrics_export_port dashboard_agent_listen_port
do printf %d -1 > "$1/own_$2" && mv "$1/own_$2" "$1/${port}_$2"
done
while read -r _ _ _ parent _ < /proc/$$/stat && [ "$parent" = "$RAY_RAYLET_PID" ]
do sleep 1
done
