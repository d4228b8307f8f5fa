"""What both sides exchange: start records (`spec`, `messages`), the run record (`record`), RPC messages (`rpc`)."""
