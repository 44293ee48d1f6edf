deepspeed --num_accelerators 1 --master_port "$MASTER_PORT" "$EXAMPLES/hugging_face/trainer.py" --model "$MODEL" \
    --text "$DATA/text.txt" --length 64 --deepspeed "$DS_CONFIG" --output_dir "$OUTPUT" --use_cpu true --bf16 true \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --max_steps 5 \
    --logging_steps 1 --log_level info --save_strategy no --report_to none
