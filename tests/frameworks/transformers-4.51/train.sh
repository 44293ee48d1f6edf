source "$HERE/../transformers/train.sh"
