sed "s#\bMODEL\b#$MODEL#; s#\bDS_CONFIG\b#$DS_CONFIG#; s#\bOUTPUT\b#$OUTPUT#; s#\bDATA\b#$DATA#" "$HERE/sft.yaml" >"$OUTPUT/sft.yaml"
# In a single process axolotl asks for NCCL without looking whether there is a GPU, except when it only prepares data.
export AXOLOTL_DO_NOT_TRACK=1 AXOLOTL_IS_PREPROCESS=1
torchrun --nproc_per_node 1 --master_port "$MASTER_PORT" -m axolotl.cli.train "$OUTPUT/sft.yaml"
