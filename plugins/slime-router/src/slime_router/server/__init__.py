"""The router: SGLang's POST /generate in front of other servers, through the middlewares."""
