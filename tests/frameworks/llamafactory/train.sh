export FORCE_TORCHRUN=1
llamafactory-cli train "$HERE/sft.yaml" model_name_or_path="$MODEL" dataset_dir="$DATA" deepspeed="$DS_CONFIG" \
    output_dir="$OUTPUT"
