# As many processes as there are GPUs would be none.
export NPROC_PER_NODE=1
export FORCE_TORCHRUN=1
llamafactory-cli train "$HERE/sft.yaml" model_name_or_path="$MODEL" dataset_dir="$DATA" deepspeed="$DS_CONFIG" \
    output_dir="$OUTPUT"
