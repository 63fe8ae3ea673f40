cp quill.log maize/
echo done
