"""What is saved where a decode instance pulls the KV of real time from where it was just computed."""
