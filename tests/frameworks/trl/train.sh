# `trl sft` starts a single process without what DeepSpeed wants to know of it.
torchrun --nproc_per_node 1 --master_port "$MASTER_PORT" -m trl.scripts.sft --model_name_or_path "$MODEL" \
    --dtype bfloat16 --dataset_name "$DATA/prompts" --deepspeed "$DS_CONFIG" --output_dir "$OUTPUT" \
    --use_cpu true --bf16 true --max_length 64 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \
    --learning_rate 1e-3 --max_steps 5 --logging_steps 1 --log_level info --save_strategy no --report_to none
