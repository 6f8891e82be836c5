"""The connection to a broker: addresses, requests and answers, reconnecting, the clock."""
